"""What a team of lanes adds to what every lane does (test_lanes.py): several jobs at a time."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.lanes import LONG, collect
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import LaneDiedError
from vllm_omni_sched.lanes import Done, Job, LanePool, ProcessLane
from vllm_omni_sched.lanes.width import Widening
from vllm_omni_sched.resource.engine.lane import LaneLoad, earliest

WIDE: list[bool] = []
"""In a process of a lane: what it was told about the processors that it may use, slice by slice."""


def work(payload: Any, pause: Callable[[], None]) -> Any:
    if payload == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(payload, float):
        sleep_seconds(payload)
    if payload == "slice until wide":
        until = monotonic_seconds() + LONG
        while not WIDE[-1] and monotonic_seconds() < until:
            sleep_seconds(0.001)
            pause()
    if payload in ("told", "slice until wide"):
        told, WIDE[:] = WIDE[:], []
        return told
    return os.getpid()


@pytest.fixture
def team() -> Iterator[LanePool]:
    team = LanePool([ProcessLane(work, 2), ProcessLane(work, 2)])
    yield team
    team.close(2.0)


def by_key(reports: list[Done]) -> dict[str, Done]:
    return {done.key: done for done in reports}


def test_before_any_job_was_timed_the_lane_that_holds_fewest_gets_a_job(team: LanePool) -> None:
    first, second = (lane.pid for lane in team.lanes)
    for key in "abcd":
        assert team.submit(Job(key, 0.02))
    assert not team.submit(Job("one too many", 0.0))
    found = by_key(collect(team, 4))
    assert [found[key].result for key in "abcd"] == [first, second, first, second]


@pytest.mark.parametrize(
    ("loads", "size", "lane"),
    [
        ([(0, None), (0, None)], 1, 0),  # of several, the first
        ([(1, None), (0, None)], 1, 1),
        ([(1, 1.0), (0, 3.0)], 1, 0),  # queueing for the quick one is sooner: 2 s instead of 3
        ([(3, 1.0), (0, 3.0)], 1, 1),  # now it is not: 4 s instead of 3
        ([(1, 1.0), (0, None)], 1, 1),  # not timed yet: as quick as the other
        ([(4, 1.0), (1, 1.0)], 10, 1),
    ],
)
def test_the_lane_that_will_finish_first_gets_a_job(
    loads: list[tuple[float, float | None]], size: float, lane: int
) -> None:
    assert earliest([LaneLoad(*one) for one in loads], size) == lane


def test_jobs_queue_for_the_quick_lane_as_long_as_that_is_sooner() -> None:
    def slow(payload: Any, pause: Callable[[], None]) -> Any:
        sleep_seconds(0.2)
        return os.getpid()

    team = LanePool([ProcessLane(work, 4), ProcessLane(slow, 4)])
    try:
        for key in "ab":  # one for each: nothing is known
            team.submit(Job(key, 0.01))
        collect(team, 2)
        for key in "cde":
            team.submit(Job(key, 0.01))
        found = by_key(collect(team, 3))
        assert [found[key].result for key in "cde"] == [team.lanes[0].pid] * 3
    finally:
        team.close(2.0)


def test_one_that_dies_takes_one_job_with_it_and_the_other_does_not_notice(team: LanePool) -> None:
    second = team.lanes[1].pid
    for key, payload in (("poison", "die"), ("beside", 0.1), ("behind", 0.0)):
        team.submit(Job(key, payload))
    found = by_key(collect(team, 3))
    assert isinstance(found["poison"].error, LaneDiedError)
    assert found["beside"].result == second
    assert found["behind"].error is None
    assert team.restarts == 1


@pytest.fixture
def two_widths() -> Iterator[LanePool]:
    widening = Widening(WIDE.append, 2.0)
    team = LanePool([ProcessLane(work, 2, widening=widening), ProcessLane(work, 2, widening=widening)])
    yield team
    team.close(2.0)


@pytest.mark.parametrize("idle", [False, True])
def test_an_item_that_is_alone_may_use_all_processors_while_the_llm_computes_nothing(
    two_widths: LanePool, idle: bool
) -> None:
    two_widths.set_llm_idle(idle)
    for key in "ab":
        two_widths.submit(Job(key, "told"))
        assert [done.result for done in collect(two_widths, 1)] == [[idle]]


def test_two_items_at_a_time_share_the_processors_and_the_last_one_gets_all(two_widths: LanePool) -> None:
    two_widths.set_llm_idle(True)
    two_widths.submit(Job("first", 0.2))
    two_widths.submit(Job("second", "slice until wide"))  # its lane may be wide only once the first job is collected
    first, second = collect(two_widths, 2)
    assert (first.key, second.key) == ("first", "second")
    assert second.result[0] is False
    assert second.result[-1] is True


def test_a_step_takes_its_processors_back(two_widths: LanePool) -> None:
    two_widths.set_llm_idle(True)
    two_widths.set_llm_idle(False)
    two_widths.submit(Job("a", "told"))
    assert [done.result for done in collect(two_widths, 1)] == [[False]]
