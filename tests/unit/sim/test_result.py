"""What a result says of its records, by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.support.sim_results import record
from vllm_omni_sched.sim.measure import Histogram, Outcome, Record, Result, percentiles
from vllm_omni_sched.sim.scenario.scenario import ClassTargets, Slo

SLO = Slo(ttft_seconds=1.0, itl_seconds=0.1, attainment=0.9)
FAILED = {"outcome": Outcome.FAILED, "first": math.inf, "end": math.inf}


def result(*records: Record, **changes: Any) -> Result:
    values = {"gaps": Histogram(), "seconds": 20.0, "measured_seconds": 10.0, "events": 5, **changes}
    return Result(name="one", seed=1, slo=SLO, records=list(records), **values)


def test_percentiles_interpolate() -> None:
    assert percentiles([4.0, 1.0, 2.0, 3.0]) == {
        "p50": 2.5,
        "p90": pytest.approx(3.7),
        "p99": pytest.approx(3.97),
        "mean": 2.5,
        "largest": 4.0,
    }
    assert set(percentiles([]).values()) == {None}


def test_times_of_requests() -> None:
    found = result(record(0, first=0.5, end=1.5), record(1, first=1.5, end=4.5)).summary()
    assert found["requests"] == 2
    assert found["ttft_seconds"]["p50"] == 0.5
    assert found["latency_seconds"]["largest"] == 3.5
    assert found["tpot_seconds"]["mean"] == pytest.approx((0.1 + 0.3) / 2)
    assert found["requests_per_second"] == 0.2
    assert found["tokens_per_second"] == 2.2


def test_failed_and_lost_requests_miss_the_slo_and_have_no_times() -> None:
    one = result(record(0), record(1, **FAILED), lost=2)
    found = one.summary()
    assert (found["failed"], found["lost"]) == (1, 2)
    assert found["within_slo"] == 0.25
    assert found["goodput_per_second"] == 0.1
    assert found["ttft_seconds"]["largest"] == 1.0
    assert sorted(one.factors()) == [1.0, math.inf, math.inf, math.inf]


def test_a_class_has_its_own_promise() -> None:
    classes = {"realtime": ClassTargets(ttft_seconds=0.5, itl_seconds=0.2)}
    one = result(record(0), record(1, sla="realtime"), classes=classes)
    assert one.attainment == 0.5
    assert one.factors() == [1.0, 2.0]
    by_class = one.summary()["by_class"]
    assert {name: part["within_slo"] for name, part in by_class.items()} == {"interactive": 1.0, "realtime": 0.0}


def test_the_larger_of_both_targets_counts() -> None:
    assert result(record(0, first=0.2, largest_gap=0.4)).factors() == [4.0]


def test_gaps_are_those_of_the_histogram() -> None:
    gaps = Histogram()
    gaps.add(0.02, 99)
    gaps.add(0.5)
    found = result(record(0), gaps=gaps).summary()
    assert found["itl_seconds"]["p50"] == pytest.approx(0.02, rel=0.005)
    assert found["itl_seconds"]["largest"] == 0.5
    assert found["by_modality"]["image"]["itl_seconds"] is None


def test_utilisation_and_device_hours() -> None:
    found = result(
        record(0),
        record(1, **FAILED),
        busy_seconds={"llm": {"llm": 30.0, "encode": 10.0}},
        held_seconds={"llm": 80.0, "video": 10.0},
        device_seconds={"llm": 7200.0},
    ).summary()
    assert found["utilisation"] == {"llm": {"all": 0.5, "llm": 0.375, "encode": 0.125}, "video": {"all": 0.0}}
    assert found["gpu_hours"] == 2.0
    assert found["gpu_hours_per_1000_requests"] == 2000.0


def test_nothing_happened() -> None:
    found = result().summary()
    assert found["within_slo"] is None
    assert found["gpu_hours_per_1000_requests"] is None
    assert found["ttft_seconds"]["p99"] is None
    json.dumps(found, allow_nan=False)


def test_a_promise_may_be_of_the_mean_gap() -> None:
    """Requests of 11 tokens in 1 s, one of whose gaps took half of it."""
    one = record(0, first=0.5, end=1.5, largest_gap=0.5)
    each, mean = result(one), result(one)
    mean.slo = Slo(ttft_seconds=1.0, itl_seconds=0.1, itl_of="mean")
    assert (each.attainment, each.factors()) == (0.0, [pytest.approx(5.0)])
    assert (mean.attainment, mean.factors()) == (1.0, [pytest.approx(1.0)])
