"""What a replica has in hand."""

from __future__ import annotations

import pytest

from vllm_omni_sched.core.pipeline.load import ReplicaLoad
from vllm_omni_sched.resource.pid import PidBatch


def load() -> ReplicaLoad:
    return ReplicaLoad(PidBatch(1.0, 0.05, 1, 8), target_seconds=1.0)


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


def test_a_target_that_no_request_alone_can_meet_is_twice_what_one_takes() -> None:
    one = ReplicaLoad(PidBatch(0.05, 1.0, 1, 8, start=8), target_seconds=0.05)
    for number in range(40):  # one alone takes 3 s, and any number together 3 s too
        one.begin(f"{number}", 3.0, 4.0 * number)
        one.through(f"{number}", 4.0 * number + 3.0, 3.0)
        one.end(f"{number}", 4.0 * number + 3.0)
    assert one.limit.limit == 8
    assert one.limit.target_seconds == pytest.approx(6.0)


def test_it_is_the_operators_where_one_alone_meets_it() -> None:
    one = ReplicaLoad(PidBatch(10.0, 1.0, 1, 8), target_seconds=10.0)
    one.begin("a", 3.0, 0.0)
    one.through("a", 3.0, 3.0)
    assert one.limit.target_seconds == 10.0


def test_what_had_company_says_nothing_of_one_alone() -> None:
    one = ReplicaLoad(PidBatch(0.05, 1.0, 1, 8), target_seconds=0.05)
    one.begin("a", 3.0, 0.0)
    one.begin("b", 3.0, 0.0)
    one.through("a", 6.0, 6.0)
    one.end("a", 6.0)
    one.through("b", 6.0, 6.0)
    one.end("b", 6.0)
    assert (one.alone_seconds, one.limit.target_seconds) == (0.0, 0.05)
