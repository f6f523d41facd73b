"""Workloads against the numbers they quote: 50,000 draws each, with the tolerance beside each number."""

from itertools import islice

import numpy as np
import pytest

from vllm_omni_sched.sim.workloads import kinds
from vllm_omni_sched.sim.workloads.base import (
    Counts,
    Quantiles,
    client_times,
    gamma_times,
    requests,
    skewed,
    spread,
)
from vllm_omni_sched.sim.workloads.registry import build

MANY = 50_000


def drawn(distribution):
    return distribution.draw(np.random.default_rng(1), MANY)


def gaps(times):
    return np.diff(np.array(list(islice(times, MANY))))


@pytest.mark.parametrize(
    ("distribution", "mean", "quantiles"),
    [
        (kinds.TEXT_TOKENS, 572, {0.5: 106, 0.9: 1914, 0.99: 3064}),
        (kinds.OUTPUT_TOKENS, 130, {0.5: 100, 0.9: 264, 0.99: 587}),
        (kinds.IMAGE_TOKENS, 650, {0.5: 540, 0.9: 1224, 0.99: 1271}),
    ],
)
def test_tokens_have_the_quoted_mean_and_quantiles(distribution, mean, quantiles):
    found = drawn(distribution)
    assert found.mean() == pytest.approx(mean, rel=0.03)
    for part, value in quantiles.items():
        assert np.quantile(found, part) == pytest.approx(value, rel=0.05)
    assert found.min() >= 1


def test_images_per_request_are_those_of_servegen():
    found = drawn(kinds.IMAGES)
    for images, part in {0: 0.006, 1: 0.798, 2: 0.066, 3: 0.076, 4: 0.021}.items():
        assert (found == images).mean() == pytest.approx(part, abs=0.005)
    assert found.mean() == pytest.approx(1.59, rel=0.02)
    assert [np.quantile(found, part) for part in (0.5, 0.9, 0.99)] == [1, 3, 9]
    assert found.max() == 49


def test_clients_are_as_unlike_as_those_of_servegen():
    found = kinds.clients(10.0)
    rates = np.array([rate for rate, _ in found])
    assert len(found) == 35
    assert rates.sum() == pytest.approx(10.0)
    assert np.sort(rates)[-4:].sum() == pytest.approx(4.9, rel=0.001)
    by_cv = sorted((cv, rate) for rate, cv in found)
    parts = np.cumsum([rate for _, rate in by_cv]) / 10
    cvs = np.array([cv for cv, _ in by_cv])
    assert cvs[np.searchsorted(parts, 0.5)] == pytest.approx(1.01, rel=0.02)
    assert cvs[np.searchsorted(parts, 0.9)] == pytest.approx(4.87, rel=0.02)
    assert rates[[cv > 1 for _, cv in found]].sum() / 10 == pytest.approx(0.51, abs=0.01)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.87])
def test_gamma_gaps_have_their_mean_and_variation(cv):
    found = gaps(gamma_times(np.random.default_rng(2), 5.0, cv))
    assert found.mean() == pytest.approx(0.2, rel=0.06)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.05)


def test_without_variation_they_are_evenly_spaced():
    assert gaps(gamma_times(np.random.default_rng(2), 4.0, 0)) == pytest.approx(0.25)


def test_the_rate_is_right_from_the_start():
    """4,000 streams of a bursty process for 10 s: an ordinary first gap would bring 50 % more."""
    counts = [
        sum(1 for _ in takewhile_before(10.0, gamma_times(generator, 1.0, 3.0)))
        for generator in np.random.default_rng(3).spawn(4000)
    ]
    assert np.mean(counts) == pytest.approx(10.0, rel=0.06)


def takewhile_before(end, times):
    for at in times:
        if at >= end:
            return
        yield at


def test_the_traffic_of_clients_together_is_burstier_than_poisson():
    times = [at for at, _ in islice(client_times(np.random.default_rng(4), kinds.clients(10.0)), MANY)]
    counts = np.bincount(np.array(times).astype(int))[:-1]
    assert counts.var() / counts.mean() > 1.5


@pytest.mark.parametrize(
    ("table", "tolerance"),
    [
        ({"kind": "servegen-mm-image", "rate": 4.0}, 0.1),
        ({"kind": "text", "rate": 40.0}, 0.1),
        ({"kind": "video-clips", "rate": 0.5}, 0.04),
        ({"kind": "poisson", "rate": 3.0}, 0.04),
        ({"kind": "mix", "rate": 6.0, "parts": [{"kind": "poisson"}, {"kind": "video-clips", "weight": 2}]}, 0.04),
        ({"kind": "day-night", "rate": 6.0, "season_seconds": 60.0, "of": {"kind": "poisson"}}, 0.04),
    ],
)
def test_the_rate_is_the_one_asked_for(table, tolerance):
    workload = build(table)
    assert workload.rate == pytest.approx(table["rate"])
    number = 10_000
    last = next(islice(requests(workload, 5), number - 1, None))
    assert number / last.arrival == pytest.approx(table["rate"], rel=tolerance)


@pytest.mark.parametrize(("service", "cv"), [("deterministic", 0.0), ("exponential", 1.0)])
def test_service_has_its_mean_and_variation(service, cv):
    table = {"kind": "poisson", "rate": 1.0, "service": service, "output_tokens": 2000}
    tokens = np.array([one.output_tokens for one in islice(requests(build(table), 8), MANY)])
    assert tokens.mean() == pytest.approx(2000, rel=0.04)
    assert tokens.std() / tokens.mean() == pytest.approx(cv, abs=0.06)


def test_poisson_gaps_are_exponential():
    times = np.array([one.arrival for one in islice(requests(build({"kind": "poisson", "rate": 2.0}), 9), MANY)])
    found = np.diff(times)
    for part in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(found, part) == pytest.approx(-np.log(1 - part) / 2, rel=0.05)


def test_a_distribution_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no least value"):
        Quantiles(((0.5, 100), (1, 200)), mean=500)
    with pytest.raises(ValueError, match="must rise"):
        Quantiles(((0.5, 100), (0.9, 200)), mean=100)
    with pytest.raises(ValueError, match="sum to 1"):
        Counts({1: 0.5, 2: 0.4})


def test_parts_fall_and_spread_has_its_mean():
    parts = skewed(10, 2, 0.5)
    assert sum(parts[:2]) == pytest.approx(0.5)
    assert sum(parts) == pytest.approx(1)
    assert parts == sorted(parts, reverse=True)
    found = spread(range(10, 50), 0.2, mean=15.0)
    assert sum(found.values()) == pytest.approx(0.2)
    assert sum(n * p for n, p in found.items()) / 0.2 == pytest.approx(15.0)
