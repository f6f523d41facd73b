"""What a team of lanes adds to what every lane does (test_lanes.py): several jobs at a time."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.lanes import collect
from vllm_omni_sched.clock import sleep_seconds
from vllm_omni_sched.config.errors import LaneDiedError
from vllm_omni_sched.lanes import Done, Job, LanePool, ProcessLane


def work(payload: Any, pause: Callable[[], None]) -> Any:
    if payload == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(payload, float):
        sleep_seconds(payload)
    return os.getpid()


@pytest.fixture
def team() -> Iterator[LanePool]:
    team = LanePool([ProcessLane(work, 2), ProcessLane(work, 2)])
    yield team
    team.close(2.0)


def by_key(reports: list[Done]) -> dict[str, Done]:
    return {done.key: done for done in reports}


def test_a_job_goes_to_the_lane_that_holds_fewest_and_of_several_to_the_first(team: LanePool) -> None:
    first, second = (lane.pid for lane in team.lanes)
    for key in "abcd":
        assert team.submit(Job(key, 0.02))
    assert not team.submit(Job("one too many", 0.0))
    found = by_key(collect(team, 4))
    assert [found[key].result for key in "abcd"] == [first, second, first, second]
    team.submit(Job("alone", 0.0))
    assert by_key(collect(team, 1))["alone"].result == first


def test_one_that_dies_takes_one_job_with_it_and_the_other_does_not_notice(team: LanePool) -> None:
    second = team.lanes[1].pid
    for key, payload in (("poison", "die"), ("beside", 0.1), ("behind", 0.0)):
        team.submit(Job(key, payload))
    found = by_key(collect(team, 3))
    assert isinstance(found["poison"].error, LaneDiedError)
    assert found["beside"].result == second
    assert found["behind"].error is None
    assert team.restarts == 1


def test_a_team_needs_a_lane() -> None:
    with pytest.raises(ValueError, match="at least one lane"):
        LanePool([])
