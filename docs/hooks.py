"""MkDocs hook: pictures that benchmarks have left under benchmarks/results appear in the site under results/."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Add every picture of a benchmark to the site, read from where the benchmark wrote it."""
    results = Path(config.config_file_path).parent / "benchmarks" / "results"
    for picture in sorted(results.rglob("*.png")):
        shown = f"results/{picture.relative_to(results).as_posix()}"
        files.append(File.generated(config, shown, abs_src_path=str(picture)))
    return files
