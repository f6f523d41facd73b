"""What is made of the runs. The runs: the benchmark itself."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sim_scale.__main__ import exponent, median_run, parse


def took(*seconds: float) -> list[dict[str, Any]]:
    return [{"cpu_seconds": one, "events_per_second": round(100 / one)} for one in seconds]


def test_the_run_in_the_middle_counts() -> None:
    found = median_run(took(4.0, 1.0, 2.0))
    assert found == {"cpu_seconds": 2.0, "events_per_second": 50, "cpu_seconds_of_runs": [1.0, 2.0, 4.0]}
    assert median_run(took(3.0))["cpu_seconds"] == 3.0
    assert median_run(took(3.0, 2.0))["cpu_seconds"] == 2.0


def test_an_exponent_is_found_again() -> None:
    rows = [{"gpus": n, "cpu_seconds_per_simulated_second": 1e-3 * n**1.1} for n in (10, 100, 1_000)]
    assert exponent(rows, "gpus") == pytest.approx(1.1)


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--rounds", "0"])
    assert "--rounds: must be at least 1, got 0" in capsys.readouterr().err
