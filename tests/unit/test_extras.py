"""What messages tell people to install can be installed."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_omni_sched.config.extras import EXTRAS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def test_they_are_the_extras_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: tuple(declared[name]) for name in EXTRAS} == EXTRAS
