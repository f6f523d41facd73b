"""A project's own tests, run on a pristine and on a patched tree, and compared.

Some fail on stock here: they want a GPU, a hub, an older transformers. What counts is that the patched tree passes
whatever the pristine one passes, and the tests that the patches add.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from patches.models import write_models
from patches.series import ROOT, release_of
from patches.sources import CACHE

# What vLLM's sources import beyond the locked environments: 0.22 wants gguf at import time.
EXTRAS = ("gguf==0.19.0", "tblib==3.2.2")


class UpstreamError(RuntimeError):
    """The tests could not be run at all."""


@dataclass(frozen=True)
class Comparison:
    pristine: dict[str, str]
    patched: dict[str, str]

    @property
    def added(self) -> list[str]:
        return sorted(self.patched.keys() - self.pristine.keys())

    @property
    def broken(self) -> list[str]:
        """Tests that pass on stock and do not on the patched tree, and failing ones that the patches add."""
        return sorted(
            [t for t, outcome in self.pristine.items() if outcome == "passed" and self.patched.get(t) != "passed"]
            + [t for t in self.added if self.patched[t] not in ("passed", "skipped")]
        )

    @property
    def failing_on_stock(self) -> list[str]:
        return sorted(t for t, outcome in self.pristine.items() if outcome == "failed")

    @property
    def num_passed(self) -> int:
        return sum(outcome == "passed" for outcome in self.patched.values())


def python_for(version: str) -> str:
    """Return the built environment's interpreter whose compiled operators are nearest to a version."""
    project, number = release_of(version)
    latest = project == "vllm" and tuple(map(int, number.split("."))) >= (0, 32)
    for name in (".venv-latest", ".venv") if latest else (".venv", ".venv-latest"):
        python = ROOT / name / "bin" / "python"
        if python.exists():
            return str(python)
    return sys.executable


def run_tests(tree: Path, tests: list[str], python: str) -> dict[str, str]:
    """Run tests and return the outcome by test id: `passed`, `failed` or `skipped`. Cached by the tree's content."""
    present = [test for test in tests if (tree / test).is_file()]
    if not present:
        return {}
    key = hashlib.sha256(json.dumps([tree.name, python, present]).encode()).hexdigest()[:16]
    stored = CACHE / f"outcomes-{key}.json"
    if stored.is_file():
        outcomes: dict[str, str] = json.loads(stored.read_text())
        return outcomes
    models = write_models(CACHE / "models")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree), str(extras(python))]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",  # stock vLLM, whatever is installed beside it
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        # The conftest of vLLM's tests loads assets from the network. The tests named here do without it.
        command = [python, "-W", "ignore", "-m", "pytest", "--quiet", "--noconftest", "-p", "no:cacheprovider"]
        command += ["--rootdir", str(tree), "-c", os.devnull, f"--junitxml={report}", "-o", "junit_family=xunit1"]
        command += [str(tree / test) for test in present]
        result = subprocess.run(command, cwd=models, env=env, capture_output=True, text=True, check=False)
        if not report.is_file():
            raise UpstreamError(f"pytest on {tree.name}: {(result.stderr or result.stdout)[-2000:]}")
        outcomes = _outcomes(report)
    stored.write_text(json.dumps(outcomes, indent=1, sort_keys=True))
    return outcomes


def _outcomes(report: Path) -> dict[str, str]:
    outcomes = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        children = {child.tag for child in case}
        outcome = "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
        # The class name starts with the path below the current folder; from "tests" on it is the same for every tree.
        where = case.get("classname", "")
        where = where[where.find("tests.") :] if "tests." in where else where
        test = f"{where}::{case.get('name')}"
        # A test that fails in its set-up and its tear-down is listed twice.
        if outcomes.get(test) != "failed":
            outcomes[test] = outcome
    return outcomes


def extras(python: str) -> Path:
    """Return a folder with `EXTRAS` installed, for PYTHONPATH."""
    folder = CACHE / "extras"
    if not folder.is_dir():
        command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *EXTRAS]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise UpstreamError(f"pip could not install {', '.join(EXTRAS)}: {result.stderr[-500:]}")
    return folder
