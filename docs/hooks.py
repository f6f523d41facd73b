"""MkDocs hook: pictures of benchmarks, which pages show from ``benchmarks/results``, are in the site in ``results``.

Pages link to the files where benchmarks have written them, so that the links also work in a view of the repository.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PICTURE = re.compile(r"(?<=\]\()((?:\.\./)*)\.\./benchmarks/(results/[^)\s]+\.png)(?=\))")
"""Link to a picture outside ``docs``: the way up to ``docs``, one step further up, and the file."""


def on_files(files: Files, config: Any) -> Files:
    """Add every picture of a benchmark to the site, read from where the benchmark wrote it."""
    results = Path(config.config_file_path).parent / "benchmarks" / "results"
    for picture in sorted(results.rglob("*.png")):
        shown = f"results/{picture.relative_to(results).as_posix()}"
        files.append(File.generated(config, shown, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let the links of a page to pictures of benchmarks lead to where the site has them."""
    return PICTURE.sub(r"\1\2", markdown)
