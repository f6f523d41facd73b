"""What the core does when replicas die: requests move, wait or fail, and its laws hold after every event."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.core import Line, started
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.monitor.recovery.events import FailReason, IncidentKind

pytestmark = pytest.mark.usefixtures("validated_core")

AR = StageKind.AR


def line(stages: int = 1, replicas: int = 2, at_once: int = 4, **recovery: Any) -> Line:
    options = {"runtime": {"recovery": recovery}, "balancing": {"policy": "least-queue"}}
    return Line(*[AR] * stages, replicas=replicas, at_once=at_once, **options)


def kill(line: Line, replica_id: int, stage_id: int = 0) -> list[e.Action]:
    """Let a replica die, and nothing else be lost with it."""
    line.tell(e.ReplicaDied(stage_id, replica_id, "killed"))
    return line.tell(e.DeathExamined(stage_id, replica_id, "killed"))


def of(kind: type[Any], actions: list[e.Action]) -> list[Any]:
    return [one for one in actions if isinstance(one, kind)]


def test_a_request_of_a_dead_replica_starts_on_another_and_the_replica_is_restarted() -> None:
    pipeline = line()
    assert pipeline.come("a") == ["a@0"]
    actions = kill(pipeline, 0)
    assert started(actions) == ["a@1"]
    assert of(e.Restart, actions) == [e.Restart(0, 0)]
    assert [one.incident.kind for one in of(e.Report, actions)] == [IncidentKind.DIED, IncidentKind.RESTARTING]
    assert pipeline.finish("a") == ("a",)
    assert of(e.Forgotten, pipeline.tell(e.Left("a")))
    assert not len(pipeline.core.recovery.policy)


def test_its_story_tells_the_move() -> None:
    pipeline = line()
    pipeline.come("a")
    kill(pipeline, 0)
    assert [one.partition(": a ")[2] for one in pipeline.core.story("a")] == [
        "arrives",
        "waits",
        "starts (idle) on replica 0",
        "is lost on replica 0",
        "runs again from stage 0",
        "starts on replica 1",
    ]


def test_nothing_moves_before_the_death_is_examined() -> None:
    pipeline = line()
    pipeline.come("a")
    found = pipeline.tell(e.ReplicaDied(0, 0))
    assert not of(e.Start, found)
    assert not of(e.Restart, found)
    assert pipeline.tick() == []


def test_without_another_replica_it_waits_for_the_restart() -> None:
    pipeline = line(replicas=1, max_wait_seconds=5.0)
    pipeline.come("a")
    actions = kill(pipeline, 0)
    assert [(one.work.request_id, one.until) for one in of(e.Postponed, actions)] == [("a", 5.0)]
    assert of(e.Wake, actions)[-1].stage_id is None
    pipeline.now = 3.0
    assert started(pipeline.tell(e.ReplicaUp(0, 0))) == ["a@0"]


def test_one_that_waits_too_long_is_given_up() -> None:
    pipeline = line(replicas=1, max_wait_seconds=5.0)
    pipeline.come("a")
    (wake,) = of(e.Wake, kill(pipeline, 0))[-1:]
    assert wake == e.Wake(None, 5.0)
    pipeline.now = wake.at
    (given_up,) = of(e.GivenUp, pipeline.tell(e.Woken(None, wake.at)))
    assert (given_up.receivers, given_up.reason) == (("a",), FailReason.WAITED)
    assert pipeline.core.story("a")[-1].endswith("a is given up (waited)")


def test_followers_move_and_fail_with_their_leader() -> None:
    pipeline = line(replicas=2, max_redispatches=1)
    pipeline.come("a", key="same")
    assert pipeline.come("b", key="same") == []
    assert started(kill(pipeline, 0)) == ["a@1"]
    pipeline.tell(e.ReplicaUp(0, 0))
    (given_up,) = of(e.GivenUp, kill(pipeline, 1))
    assert (given_up.receivers, given_up.reason) == (("a", "b"), FailReason.REDISPATCHES)


def test_a_request_whose_input_is_lost_runs_again_from_where_it_can_be_made() -> None:
    pipeline = line(stages=2)
    request = pipeline.arrive("a")
    assert pipeline.submit(request) == ["a@0"]
    pipeline.finish("a")
    assert pipeline.submit(request, 1) == ["a@0"]
    pipeline.tell(e.ReplicaDied(1, 0))
    pipeline.tell(e.InputsLost(1, "a"))
    actions = pipeline.tell(e.DeathExamined(1, 0))
    (again,) = of(e.RunsAgain, actions)
    assert again.stages == (0, 1)
    (start,) = of(e.Start, actions)
    assert (start.work.stage_id, start.work.replica_id) == (0, 0)
    assert pipeline.core.story("a")[-2].endswith("runs again from stage 0")


def test_a_follower_whose_output_is_held_runs_no_earlier_stage_again() -> None:
    pipeline = line(stages=2)
    first, second = pipeline.arrive("a"), pipeline.arrive("b")
    pipeline.submit(first, key="same")
    pipeline.submit(second, key="same")
    assert pipeline.finish("a") == ("a", "b")
    assert pipeline.submit(second, 1) == ["b@0"]
    (again,) = of(e.RunsAgain, kill(pipeline, 0, stage_id=1))
    assert again.stages == (1,)


def test_the_queue_of_a_stage_without_a_replica_fails_when_none_is_coming() -> None:
    pipeline = line(replicas=1, at_once=1, restart=False)
    pipeline.come("a")
    pipeline.come("b")
    actions = kill(pipeline, 0)
    assert [(one.receivers, one.reason) for one in of(e.GivenUp, actions)] == [
        (("a",), FailReason.NO_REPLICA),
        (("b",), FailReason.NO_REPLICA),
    ]
    assert of(e.Unserved, actions) == [e.Unserved(0, 0.0, FailReason.NO_REPLICA)]
    assert not of(e.GivenUp, pipeline.tell(e.Tick()))  # once
    late = pipeline.arrive("c")
    pipeline.submit(late)
    assert pipeline.core.story("c")[-1].endswith("c is given up (no_replica)")


def test_a_new_replica_that_starts_is_waited_for() -> None:
    pipeline = line(replicas=1, at_once=1, restart=False)
    pipeline.come("a")
    pipeline.come("b")
    pipeline.tell(e.ReplicaStarting(0))
    assert [one.receivers for one in of(e.GivenUp, kill(pipeline, 0))] == [("a",)]
    pipeline.tell(e.ReplicaStarting(0, on=False))
    pipeline.tell(e.ReplicaUp(0, 1))
    assert pipeline.tick() == ["b@1"]


def test_a_restart_that_fails_is_repeated_later_and_then_given_up() -> None:
    pipeline = line(replicas=2, max_restarts=2)
    assert of(e.Restart, kill(pipeline, 0))
    (wake,) = of(e.Wake, pipeline.tell(e.RestartFailed(0, 0, "no memory")))
    pipeline.now = wake.at
    assert of(e.Restart, pipeline.tell(e.Woken(None, wake.at))) == [e.Restart(0, 0)]
    reports = of(e.Report, pipeline.tell(e.RestartFailed(0, 0, "no memory")))
    assert reports[-1].incident.kind is IncidentKind.GIVEN_UP


def test_without_recovery_nothing_follows() -> None:
    pipeline = line(enabled=False)
    pipeline.come("a")
    assert [type(one) for one in pipeline.tell(e.ReplicaDied(0, 0))] == [e.Lost]
    assert pipeline.tell(e.DeathExamined(0, 0)) == []
