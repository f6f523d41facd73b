"""Replicas on other hosts: which ones get requests, and what follows from their end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.core import Line, started
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.monitor.recovery.events import FailReason

pytestmark = pytest.mark.usefixtures("validated_core")

STANDBY = "10.0.0.9"


def line(**options: Any) -> Line:
    return Line(StageKind.AR, runtime=options)


def of(kind: type, actions: list[e.Action]) -> list[Any]:
    return [one for one in actions if isinstance(one, kind)]


def kill(pipeline: Line, replica_id: int, stage_id: int = 0) -> list[e.Action]:
    actions = pipeline.tell(e.ReplicaDied(stage_id, replica_id))
    return actions + pipeline.tell(e.DeathExamined(stage_id, replica_id))


def test_a_replica_of_another_host_is_not_restarted_from_here() -> None:
    pipeline = line(recovery={"max_wait_seconds": 5.0})
    pipeline.tell(e.ReplicaUp(0, 1, host="10.0.0.2"))
    assert of(e.Restart, kill(pipeline, 1)) == []
    assert [(one.stage_id, one.replica_id) for one in of(e.Restart, kill(pipeline, 0))] == [(0, 0)]


def test_requests_wait_for_another_host_and_go_to_whichever_replica_joins() -> None:
    pipeline = line(recovery={"max_wait_seconds": 5.0, "restart": False})
    pipeline.tell(e.ReplicaUp(0, 1, host="10.0.0.2"))
    kill(pipeline, 0)
    assert pipeline.come("a") == ["a@1"]
    assert of(e.GivenUp, kill(pipeline, 1)) == []
    assert pipeline.come("b") == []
    pipeline.now = 4.0
    assert started(pipeline.tell(e.ReplicaUp(0, 2, host="10.0.0.3"))) == ["a@2"]
    pipeline.finish("a")
    assert pipeline.tick() == ["b@2"]


def test_a_host_that_does_not_come_back_is_given_up_after_the_window() -> None:
    pipeline = line(recovery={"max_wait_seconds": 5.0, "restart": False, "window_seconds": 20.0})
    pipeline.tell(e.ReplicaUp(0, 1, host="10.0.0.2"))
    kill(pipeline, 0)
    kill(pipeline, 1)
    recovery = pipeline.core.recovery
    assert recovery is not None
    assert recovery.expects_replica(0)
    pipeline.now = 21.0
    pipeline.tick()
    assert not recovery.expects_replica(0)
    (given_up,) = of(e.GivenUp, pipeline.tell(e.Waits(_work(pipeline, "late"))))
    assert given_up.reason is FailReason.NO_REPLICA
    assert started(pipeline.tell(e.ReplicaUp(0, 1, host="10.0.0.2"))) == []
    assert pipeline.tick() == ["late@1"]


def _work(pipeline: Line, name: str) -> StageWork:
    request = pipeline.arrive(name)
    work = StageWork(request_id=name, stage_id=0, known=request, arrived=pipeline.now, key=None)
    pipeline.tell(e.Submitted(work, pipeline.features))
    return work


def test_a_standby_gets_requests_only_while_no_other_replica_serves() -> None:
    pipeline = line(hosts={"standby": [STANDBY]}, recovery={"restart": False})
    pipeline.tell(e.ReplicaUp(0, 1, host=STANDBY))
    assert pipeline.come("a") == ["a@0"]
    assert pipeline.come("b") == []
    assert sorted(started(kill(pipeline, 0)) + pipeline.tick()) == ["a@1"]
    pipeline.now += 1.0
    pipeline.finish("a")
    assert pipeline.tick() == ["b@1"]
    pipeline.tell(e.ReplicaUp(0, 2, host="10.0.0.3"))
    pipeline.now += 1.0
    pipeline.finish("b")
    assert pipeline.come("c") == ["c@2"]
    assert pipeline.come("d") == []


@pytest.mark.parametrize("what", ["suspected", "draining"])
def test_a_standby_stands_in_for_a_replica_that_may_get_nothing(what: str) -> None:
    pipeline = line(hosts={"standby": [STANDBY]})
    pipeline.tell(e.ReplicaUp(0, 1, host=STANDBY))
    event = e.ReplicaSuspected if what == "suspected" else e.ReplicaDraining
    pipeline.tell(event(0, 0, True))
    assert pipeline.come("a") == ["a@1"]
    pipeline.tell(event(0, 0, False))
    pipeline.now += 1.0
    pipeline.finish("a")
    assert pipeline.come("b") == ["b@0"]
    assert pipeline.come("c") == []


def test_a_standby_may_be_removed() -> None:
    pipeline = line(hosts={"standby": [STANDBY]})
    pipeline.tell(e.ReplicaUp(0, 1, host=STANDBY))
    pipeline.tell(e.ReplicaGone(0, 1))
    assert pipeline.come("a") == ["a@0"]


def two_stages(**hosts: Any) -> Line:
    """Two stages, the second with a replica on the host of the first and one on another."""
    pipeline = Line(StageKind.AR, StageKind.AR, at_once=4, runtime={"hosts": hosts})
    pipeline.tell(e.ReplicaUp(1, 1, host="10.0.0.2"))
    pipeline.tell(e.PayloadsMeasured(0, 1, 1, 3_000_000))
    return pipeline


def pass_on(pipeline: Line, name: str) -> list[str]:
    pipeline.come(name)
    pipeline.finish(name)
    return pipeline.submit(pipeline.core.context.known[name], 1)


def test_a_replica_on_another_host_costs_the_time_of_the_payload() -> None:
    """A request takes one second (`Line`): the far replica is chosen once the near one has so much more work."""
    slow = two_stages(link_bytes_per_second=1_000_000)
    assert [pass_on(slow, name) for name in "abcd"] == [["a@0"], ["b@0"], ["c@0"], ["d@1"]]
    fast = two_stages(link_bytes_per_second=100_000_000)
    assert [pass_on(fast, name) for name in "ab"] == [["a@0"], ["b@1"]]


def test_without_speeds_all_hosts_are_equally_near() -> None:
    pipeline = two_stages()
    assert [pass_on(pipeline, name) for name in "ab"] == [["a@0"], ["b@1"]]


def test_the_link_of_a_single_host() -> None:
    pipeline = two_stages(links={"10.0.0.2": 1_000_000})
    pipeline.tell(e.ReplicaUp(1, 2, host="10.0.0.3"))
    assert [pass_on(pipeline, name) for name in "abc"] == [["a@0"], ["b@2"], ["c@0"]]
