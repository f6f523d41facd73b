"""The page on scale says what was measured."""

import json
from pathlib import Path

from benchmarks.sim_scale.report import tables

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_result() -> None:
    results = json.loads((ROOT / "benchmarks/results/sim_scale.json").read_text())["results"]
    assert tables(results) in (ROOT / "docs/studies/scale.md").read_text()
