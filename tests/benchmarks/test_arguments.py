"""Arguments that the benchmarks have in common."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks.harness.arguments import add_common


def parser(**asked: object) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    add_common(made, **asked)  # type: ignore[arg-type]
    return made


def test_each_benchmark_has_a_folder_of_results_and_what_it_asks_for() -> None:
    out = Path("benchmarks/results")
    assert vars(parser().parse_args([])) == {"seed": 0, "out": out, "despite_load": False}
    assert vars(parser(seed=None, timed=False).parse_args([])) == {"out": out}
    every = parser(rounds=3, seed=7, python=True, name=True).parse_args([])
    asked = {"rounds": 3, "seed": 7, "python": sys.executable, "name": ""}
    assert vars(every) == asked | {"out": out, "despite_load": False}


def test_at_least_one_round_is_measured() -> None:
    assert parser(rounds=3).parse_args(["--rounds", "1"]).rounds == 1
    with pytest.raises(argparse.ArgumentError, match="must be at least 1, got 0"):
        parser(rounds=3).parse_args(["--rounds", "0"])
