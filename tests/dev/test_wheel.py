"""The wheel has the compiled steps of small messages where there is a C compiler, and works without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = "/no/compiler"
SHOW = (
    "from vllm_omni_sched.connectors import native; print(native.__file__); print(native.kernel); print(native.reason)"
)


def wheel(folder: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "CC" in environment:
        assert f"the C compiler {WITHOUT} cannot be run" in done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


def shown(archive: Path, folder: Path, **environment: str) -> list[str]:
    """Return what a process prints that imports the package from an unpacked wheel."""
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    command = [sys.executable, "-P", "-c", SHOW]
    variables = {**os.environ, "PYTHONPATH": str(folder), **environment}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(str(folder))
    return lines[1:]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_a_wheel_that_is_built_with_a_compiler_has_the_compiled_steps(tmp_path: Path) -> None:
    made = wheel(tmp_path)
    assert f"-cp3{sys.version_info.minor}-linux_" in made.name
    module, reason = shown(made, tmp_path / "there")
    assert "native/_messages" in module
    assert "compiled" in reason
    module, reason = shown(made, tmp_path / "off", VLLM_OMNI_SCHED_NATIVE="0")
    assert module == "None"
    assert "VLLM_OMNI_SCHED_NATIVE=0" in reason


def test_a_wheel_that_is_built_without_a_compiler_is_pure(tmp_path: Path) -> None:
    made = wheel(tmp_path, CC=WITHOUT)
    assert made.name.endswith("-py3-none-any.whl")
    module, reason = shown(made, tmp_path / "there")
    assert module == "None"
    assert reason.startswith("not built")
