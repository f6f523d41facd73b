"""The arrivals of ServeGen: derived as totals, and forecasts scored on them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.forecast.online import follow
from benchmarks.forecast.recorded import CATEGORIES, DAY_BINS, derive, read_arrivals
from vllm_omni_sched.monitor.forecast.load import ForecastOptions

OPTIONS = ForecastOptions(bin_seconds=600.0, season_bins=24, horizon_seconds=1200.0, refit_bins=12)


def test_the_committed_arrivals_are_whole_days_with_their_source() -> None:
    found = read_arrivals()
    assert tuple(found) == CATEGORIES
    assert {name: len(series) / DAY_BINS for name, series in found.items()} == {
        "language/m-large": 14,
        "language/m-mid": 14,
        "language/m-small": 14,
        "multimodal/mm-image": 1,
        "reason/deepseek-r1": 1,
    }
    assert all(np.all(series >= 0) and series.sum() > 0 for series in found.values())


def test_arrivals_are_the_sum_over_clients(tmp_path: Path) -> None:
    for category in CATEGORIES:
        folder = tmp_path / "data" / category
        folder.mkdir(parents=True)
        (folder / "chunk-0-trace.csv").write_text("0,0.5,1.0,Gamma,1,1\n600,0,0,,0,0\n")
        (folder / "chunk-1-trace.csv").write_text("0,1.5,1.0,Gamma,1,1\n600,0.01,1.0,Gamma,1,1\n")
    body = json.loads(derive(tmp_path / "data", tmp_path / "out.json").read_text())
    assert body["licence"] == "Apache-2.0"
    assert body["arrivals"] == {category: [1200, 6] for category in CATEGORIES}


def test_a_folder_without_a_category_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"m-large has no chunk-N-trace\.csv"):
        derive(tmp_path, tmp_path / "out.json")


def test_of_one_day_there_is_no_yesterday_to_compare_with() -> None:
    series = 100.0 + np.random.default_rng(1).integers(0, 20, 48)
    short, long = follow(series, OPTIONS, 12), follow(series, OPTIONS, 24)
    assert set(short["mape"]) == {"ours", "naive"}
    assert "seasonal_naive_wql" not in short
    assert set(long["mape"]) == {"ours", "naive", "seasonal_naive"}


def test_errors_are_parts_of_the_arrivals_and_empty_bins_have_none() -> None:
    series = np.array([100.0, 200.0] * 24)
    series[-1] = 0.0
    found = follow(series, OPTIONS, 24)
    assert found["mape"]["naive"] == 0.0  # it knows the value of two bins before; the last bin does not count
    assert found["naive_wql"] == pytest.approx(200.0 / series[24:].sum())  # there it does
