"""Quantiles and buckets of `LatencyHistogram`."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_omni_sched.connectors.latency_histogram import LONGEST, SHORTEST, STEPS, LatencyHistogram

WITHIN = 2 ** (0.5 / STEPS)  # half a bucket
seconds = st.lists(st.floats(2.0**SHORTEST, 2.0**LONGEST), min_size=1, max_size=200)


def times_of(values: list[float]) -> LatencyHistogram:
    times = LatencyHistogram()
    for value in values:
        times.observe(value)
    return times


@given(seconds, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_its_stated_error(values: list[float], q: float) -> None:
    exact = sorted(values)[math.ceil(q * len(values)) - 1]
    told = times_of(values).quantile(q)
    assert told is not None
    assert exact / (WITHIN * 1.0001) <= told <= exact * WITHIN * 1.0001


@given(seconds)
@example([math.nextafter(2.0**exponent, math.inf) for exponent in range(SHORTEST, LONGEST)])
def test_buckets_are_exact_and_the_sum_is_kept(values: list[float]) -> None:
    times = times_of(values)
    for bound, count in times.buckets():
        assert count == sum(value <= bound for value in values)
    assert times.count == len(values)
    assert times.sum == pytest.approx(sum(values))


@given(seconds, seconds)
def test_added_up_they_are_as_observed_together(some: list[float], others: list[float]) -> None:
    both = times_of(some)
    both.add(times_of(others))
    together = times_of(some + others)
    assert list(both.buckets()) == list(together.buckets())
    assert both.quantile(0.9) == together.quantile(0.9)


def test_what_is_out_of_range_counts_at_its_end() -> None:
    times = times_of([0.0, -1.0, 1e-9, 1e6])
    assert next(times.buckets())[1] == 3
    assert times.count == 4
    assert times.quantile(1.0) == pytest.approx(2.0**LONGEST, rel=0.05)


def test_nothing_has_no_quantile() -> None:
    assert LatencyHistogram().quantile(0.5) is None
    assert LatencyHistogram().facts() == {"count": 0}
    assert set(times_of([1.0]).facts()) == {"count", "p50", "p90", "p99"}
