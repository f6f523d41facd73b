"""Targets of the Makefile that take long are made, with less work; the environments are there, and are not built."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOUND = "test_the_last_is_done_within_grahams_bound"
ALL_BUT_ITS_FILE = (
    *("--ignore-glob=tests/[!p]*", "--ignore=tests/patches"),
    *("--ignore-glob=tests/properties/test_[!b]*", "--ignore=tests/properties/test_balanced_order.py"),
)
"""Arguments of pytest: a selection by name alone would have it import all tests."""


def make(target: str, *words: str, **variables: str) -> str:
    """Make a target in this checkout; return what was printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTEST", "VENVS", "WORKERS")}
    done = subprocess.run(
        ["make", "--no-print-directory", "PYTHON=true", target, *words],
        cwd=ROOT,
        env=kept | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_make_test_long() -> None:
    """The target runs the tests marked `long`; properties are, as they have more examples there than in `make test`."""
    said = make("test-long", VENVS=".venv", WORKERS="1", PYTEST=shlex.join([*ALL_BUT_ITS_FILE, "-k", BOUND]))
    assert said.splitlines()[-1].startswith("make test-long: OK  1 passed in .venv")
    assert f"tests.properties.test_balance::{BOUND} (.venv)" in said


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
def test_make_bench(tmp_path: Path) -> None:
    """The benchmarks of the target measure stock and ours, and write results."""
    where = f"--despite-load --out {tmp_path}"
    said = make(
        "bench",
        f"STEP_COST=--versions 0.33.0 --kinds stock,ours --runners v1 --scenarios decode --sizes 8 {where}",
        f"REALTIME=--frames 8 --bucket 4 {where}",
        f"OVERHEAD=--requests 2 --tokens 4 --min-rounds 1 --max-rounds 2 --warm-up 0 {where}",
    )
    results = {file.stem.partition("-")[0]: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert results.keys() == {"step_cost", "realtime", "overhead"}, said
    for name, by in (("step_cost", "kind"), ("realtime", "variant"), ("overhead", "variant")):
        assert {"stock", "ours"} <= {one[by] for one in results[name]["results"]}
