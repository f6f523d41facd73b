"""What messages tell people to install can be installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from vllm_omni_sched.config.extras import EXTRAS, how_to_install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("vllm_omni_sched", "docs", "benchmarks", "dev", "tests")
ON_AN_INDEX = re.compile(r"""[Ii]nstall\s+["'`]?vllm[-_]omni[-_]sched""")


def test_they_are_the_extras_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: tuple(declared[name]) for name in EXTRAS} == EXTRAS


def test_the_page_that_says_how_to_install_lists_them():
    install = (ROOT / "docs" / "quickstart.md").read_text().split("## Install")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", install, re.MULTILINE)) == set(EXTRAS) - {"vllm"}
    dockerfile = (ROOT / "docs" / "deployment.md").read_text()
    assert set(re.search(r"EXTRAS=([\w,]+)", dockerfile)[1].split(",")) <= set(EXTRAS)


def test_the_command_can_be_pasted_into_a_shell():
    assert how_to_install("video") == "pip install av pillow"
    assert how_to_install("vllm").startswith("pip install 'vllm>=")


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_says_that_this_package_is_on_an_index(folder: str):
    texts = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml", ".toml")]
    assert texts
    named = [path for path in texts if path != Path(__file__) and ON_AN_INDEX.search(path.read_text())]
    assert named == []


def test_the_readme_does_not_either():
    assert ON_AN_INDEX.search((ROOT / "README.md").read_text()) is None
