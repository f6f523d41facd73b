"""Compile modules with mypyc, in a process of its own: `build.py` runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

GROUP = "vllm_omni_sched_simulator"
FLAGS = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--no-site-packages")


def main(arguments: Sequence[str]) -> None:
    """Compile modules into the current folder; ``arguments``: optimisation level, path of the package, their names."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    level, package, *names = arguments
    sources = [str(Path(package, *name.split(".")).with_suffix(".py")) for name in names]
    extensions = mypycify([*FLAGS, *sources], opt_level=level, debug_level="0", target_dir="c", group_name=GROUP)
    command = build_ext(Distribution({"name": GROUP, "ext_modules": extensions}))
    command.build_lib, command.build_temp = "lib", "objects"
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    main(sys.argv[1:])
