"""The core knows which replica an anomaly concerns, and asks `Remedies` what follows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.core import Line
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.monitor.anomaly.finding import AnomalyKind
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.monitor.recovery.remedies import RemedyReason, RemedyStep, ReplaceOutcome

pytestmark = pytest.mark.usefixtures("validated_core")

AR = StageKind.AR
ANOMALY = {"min_stage_seconds": 1.0, "max_stage_seconds": 10.0}


def line(*act_on: str, replicas: int = 2, **recovery: Any) -> Line:
    runtime = {"recovery": {"act_on": list(act_on), "hang_seconds": None, **recovery}}
    return Line(AR, replicas=replicas, runtime=runtime, monitoring={"anomaly": ANOMALY})


def remedies(actions: list[e.Action]) -> list[tuple[RemedyStep, Replica, RemedyReason]]:
    found = [one.decision for one in actions if isinstance(one, e.Remedy)]
    return [(one.step, one.replica, one.reason) for one in found]


def check(pipeline: Line, seconds: float) -> list[tuple[RemedyStep, Replica, RemedyReason]]:
    pipeline.now += seconds
    return remedies(pipeline.tell(e.Check()))


def test_a_request_that_takes_too_long_concerns_its_replica() -> None:
    pipeline = line("timeout")
    (first,) = pipeline.come("a")
    replica = Replica(0, int(first.rpartition("@")[2]))
    pipeline.tell(e.Check())
    assert check(pipeline, 11.0) == [(RemedyStep.REPLACE, replica, RemedyReason.ANOMALY)]
    ended = e.ReplaceEnded(0, replica.index, ReplaceOutcome.NOT_EMPTY)
    assert remedies(pipeline.tell(ended)) == [(RemedyStep.TERMINATE, replica, RemedyReason.NOT_EMPTY)]


def test_what_finishes_while_it_is_drained_shows_that_it_works() -> None:
    pipeline = line("timeout", replicas=1)
    pipeline.come("a")
    pipeline.tell(e.Check())
    assert check(pipeline, 11.0)
    pipeline.finish("a")
    ended = e.ReplaceEnded(0, 0, ReplaceOutcome.NOT_EMPTY)
    assert remedies(pipeline.tell(ended)) == [(RemedyStep.LEAVE, Replica(0, 0), RemedyReason.STILL_WORKS)]


def test_leaks_and_sick_edges_are_told_by_the_driver() -> None:
    pipeline = line("leak")
    assert remedies(pipeline.tell(e.AnomalyFound(0, 1, AnomalyKind.SICK_EDGE_ERRORS))) == []
    found = remedies(pipeline.tell(e.AnomalyFound(0, 1, AnomalyKind.MEMORY_LEAK)))
    assert found == [(RemedyStep.REPLACE, Replica(0, 1), RemedyReason.ANOMALY)]


@pytest.mark.parametrize("event", [e.ReplicaDown(0, 1), e.ReplicaSuspected(0, 1), e.ReplicaDraining(0, 1)])
def test_what_does_not_serve_is_not_replaced(event: e.Event) -> None:
    pipeline = line("leak")
    pipeline.tell(event)
    assert remedies(pipeline.tell(e.AnomalyFound(0, 1, AnomalyKind.MEMORY_LEAK))) == []
    assert check(pipeline, 1.0) == []
    assert remedies(pipeline.tell(e.AnomalyFound(0, 7, AnomalyKind.MEMORY_LEAK))) == []  # there is none


def test_by_default_nothing_follows() -> None:
    pipeline = Line(AR, replicas=2, monitoring={"anomaly": ANOMALY})
    pipeline.come("a")
    pipeline.tell(e.Check())
    pipeline.now += 11.0
    actions = pipeline.tell(e.Check())
    assert any(isinstance(one, e.AnomalyBegins) for one in actions)
    assert not any(isinstance(one, e.Remedy) for one in actions)
    assert pipeline.tell(e.AnomalyFound(0, 1, AnomalyKind.MEMORY_LEAK)) == []
