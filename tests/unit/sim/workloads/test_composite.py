"""Load that goes up and down, by the numbers of its options."""

from itertools import takewhile

import numpy as np
import pytest

from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.registry import Season, SeasonOptions, build

DAY = 960.0


def factors(seconds=DAY, step=1.0, **options):
    season = Season(SeasonOptions(season_seconds=DAY, **options), np.random.default_rng(1))
    return np.array([season.at(at) for at in np.arange(0, seconds, step)])


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 5.0, 20.0])
def test_a_season_has_its_peak_and_the_mean_1(ratio):
    found = factors(peak_ratio=ratio, peak_at=0.25)
    assert found.mean() == pytest.approx(1.0, abs=1e-3)
    assert found.max() == pytest.approx(ratio, rel=1e-3)
    assert found.min() > 0
    if ratio > 1:
        assert found.argmax() == DAY / 4


def test_noise_has_its_spread_and_the_mean_1():
    found = np.log(factors(60 * DAY, 10.0, peak_ratio=1.0, noise=0.2))
    assert found.std() == pytest.approx(0.2, rel=0.05)
    assert np.exp(found).mean() == pytest.approx(1.0, abs=0.02)


def test_a_change_is_for_good():
    before = factors(4 * DAY)
    after = factors(4 * DAY, change_at_seconds=2 * DAY, change_ratio=3.0, change_shift=0.25)
    half = int(2 * DAY)
    assert after[:half] == pytest.approx(before[:half])
    assert after[half:].mean() == pytest.approx(3.0, abs=0.01)
    assert after[half:].argmax() == before[:half].argmax() - DAY / 4


@pytest.mark.parametrize(
    "options",
    [
        {"peak_ratio": 3.0, "noise": 1.0},
        {"change_at_seconds": 10.0, "change_ratio": 5.0},
        {"change_at_seconds": 10.0, "change_ratio": 0.1},
    ],
)
def test_it_never_exceeds_what_thinning_relies_on(options):
    found = factors(20 * DAY, **options)
    assert found.max() <= Season.largest(SeasonOptions(season_seconds=DAY, **options))


def test_thinned_requests_follow_the_season():
    table = {"kind": "day-night", "rate": 3.0, "season_seconds": DAY, "peak_ratio": 2.5, "of": {"kind": "poisson"}}
    workload = build(table)
    times = np.array([one.arrival for one in takewhile(lambda one: one.arrival < 10 * DAY, requests(workload, 1))])
    by_part = np.bincount((times % DAY / DAY * 12).astype(int)) / (10 * DAY / 12)
    expected = 3.0 * factors(peak_ratio=2.5).reshape(12, -1).mean(axis=1)
    assert by_part == pytest.approx(expected, rel=0.15, abs=0.1)


def test_the_mean_holds_for_an_inner_kind_with_clients():
    table = {"kind": "day-night", "rate": 5.0, "season_seconds": 100.0, "of": {"kind": "text"}}
    number = sum(1 for _ in takewhile(lambda one: one.arrival < 4000, requests(build(table), 2)))
    assert number / 4000 == pytest.approx(5.0, rel=0.06)
