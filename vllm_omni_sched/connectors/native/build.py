"""Compile `messages.c`, with the standard library alone: also wheels and the development set-up do it by this file."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().with_name("messages.c")
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wall", "-Wextra")
QUIET = ("-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type")
SECONDS = 120


class BuildError(Exception):
    """Explains in one line why the compiled steps could not be built."""


def target(folder: Path) -> Path:
    """Return the path of the compiled module in a folder, for the running Python."""
    return folder / f"_messages{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(folder: Path) -> Path:
    """Compile the module for the running Python into a folder; return its path.

    It appears there complete: processes that import meanwhile find the former one, or none.

    Raises:
        BuildError: there is no compiler, or no header of Python, or compiling fails.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    built = target(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        made = Path(scratch) / built.name
        command = [*compiler, *FLAGS, *QUIET, f"-I{sysconfig.get_path('include')}", str(SOURCE), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the C compiler {compiler[0]} cannot be run: {error}") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason given"]
            raise BuildError(f"{compiler[0]} cannot compile {SOURCE.name}: {lines[0].strip()}")
        made.replace(built)
    return built


def main() -> int:
    """Build the module beside its source."""
    try:
        print(f"built {build(SOURCE.parent)}")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
