"""What a replica has in hand."""

from __future__ import annotations

import pytest

from vllm_omni_sched.core.pipeline.load import ReplicaLoad
from vllm_omni_sched.resource.pid import PidBatch


def load() -> ReplicaLoad:
    return ReplicaLoad(8)


def test_one_alone_has_all_the_time() -> None:
    one = load()
    one.begin("a", 4.0, 10.0)
    assert one.remaining_seconds(13.0) == pytest.approx(1.0)
    assert one.end("a", 14.0) == pytest.approx(4.0)
    assert one.remaining_seconds(20.0) == 0.0


def test_requests_that_run_together_share_the_time() -> None:
    one = load()
    one.begin("a", 4.0, 0.0)
    one.begin("b", 4.0, 2.0)
    assert one.remaining_seconds(4.0) == pytest.approx(1.0 + 3.0)
    assert one.end("a", 6.0) == pytest.approx(2.0 + 2.0)
    assert one.end("b", 7.0) == pytest.approx(2.0 + 1.0)


def test_time_in_which_nothing_ran_is_nobodys() -> None:
    one = load()
    one.begin("a", 1.0, 0.0)
    one.end("a", 1.0)
    one.begin("b", 1.0, 100.0)
    assert one.end("b", 101.0) == pytest.approx(1.0)


def test_one_that_takes_longer_than_it_should_is_nearly_done() -> None:
    one = load()
    one.begin("a", 4.0, 0.0)
    assert one.remaining_seconds(100.0) == pytest.approx(0.4)


def test_one_that_is_not_there_had_nothing() -> None:
    one = load()
    assert one.end("a", 1.0) is None
    one.begin("a", 1.0, 1.0)
    one.end("a", 2.0)
    assert one.end("a", 3.0) is None


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    one = load()
    one.begin("a", 4.0, 10.0)
    assert one.remaining_seconds(5.0) == pytest.approx(4.0)
    assert one.end("a", 6.0) == pytest.approx(1.0)


def test_without_a_target_only_max_num_seqs_limits() -> None:
    one = ReplicaLoad(2)
    assert one.limit() == 2
    one.begin("a", 1.0, 0.0)
    one.through("a", 60.0, 60.0, memory_used=1.0)
    assert (one.limit(), one.limit(ahead=1)) == (2, 3)


def test_a_controller_limits_those_whose_latency_it_measures() -> None:
    """Requests that decode do not count; `max_num_seqs` limits all."""
    one = ReplicaLoad(4, PidBatch(1.0, 1.0, 1, 2, start=2))
    for name, limit in ("a", 2), ("b", 2):
        one.begin(name, 1.0, 0.0)
        assert one.limit() == limit
    one.through("a", 1.0, 1.0)
    assert one.limit() == 3
    one.through("b", 1.0, 1.0)
    assert one.limit() == 4
    one.begin("c", 1.0, 1.0)
    assert one.limit() == 4
    one.end("c", 1.0)
    one.end("a", 1.0)
    assert one.limit() == 3


def test_latencies_above_the_target_lower_the_limit_at_once_to_its_least() -> None:
    """A target that no request alone can meet is the operator's choice: one prefill at a time, and all decode."""
    one = ReplicaLoad(8, PidBatch(0.05, 1.0, 1, 8, start=8))
    for number in range(40):
        one.begin(f"{number}", 3.0, 4.0 * number)
        one.through(f"{number}", 4.0 * number + 3.0, 3.0)
        if number < 37:
            one.end(f"{number}", 4.0 * number + 3.0)
    assert one.control is not None
    assert (one.control.limit, len(one), one.limit()) == (1, 3, 4)


def test_memory_in_use_lowers_it_whatever_the_latency() -> None:
    one = ReplicaLoad(8, PidBatch(1.0, 1.0, 1, 8, start=8, memory_high=0.9))
    for number in range(5):
        one.begin(f"{number}", 0.1, float(number))
        one.through(f"{number}", number + 0.1, 0.1, memory_used=0.99)
    assert one.control is not None
    assert one.control.limit < 8
