"""What follows from an anomaly of a replica that serves: a table of the rules of `Remedies`."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from vllm_omni_sched.monitor.anomaly.finding import AnomalyKind
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.monitor.recovery.remedies import (
    TRIGGERS,
    Remedies,
    RemedyAction,
    RemedyOptions,
    RemedyReason,
    RemedyStep,
    ReplaceOutcome,
    Trigger,
)

A, B, ELSEWHERE = Replica(0, 0), Replica(0, 1), Replica(1, 0)
LEAK, TIMEOUT, STUCK = AnomalyKind.MEMORY_LEAK, AnomalyKind.STAGE_TIMEOUT, AnomalyKind.STUCK_QUEUE
SICK = AnomalyKind.SICK_EDGE_ERRORS
REPLACE, TERMINATE, LEAVE = RemedyStep.REPLACE, RemedyStep.TERMINATE, RemedyStep.LEAVE


class Case:
    """Remedies whose time stands still but for `pass_`; ``down``: replicas that do not serve."""

    def __init__(self, **options: Any) -> None:
        self.now, self.down = 1000.0, set[Replica]()
        chosen = RemedyOptions(**{"act_on": frozenset(Trigger), "cooldown_seconds": 100.0, **options})
        self.remedies = Remedies(chosen, lambda replica: replica not in self.down)

    def found(self, kind: AnomalyKind, replica: Replica) -> list[tuple[RemedyStep, Replica, RemedyReason]]:
        return self._short(self.remedies.found(kind, replica, self.now))

    def ended(self, replica: Replica, outcome: ReplaceOutcome) -> list[tuple[RemedyStep, Replica, RemedyReason]]:
        return self._short(self.remedies.ended(replica, outcome, self.now))

    def pass_(self, seconds: float) -> list[tuple[RemedyStep, Replica, RemedyReason]]:
        self.now += seconds
        return self._short(self.remedies.tick(self.now))

    def _short(self, actions: list[RemedyAction]) -> list[tuple[RemedyStep, Replica, RemedyReason]]:
        self.remedies.validate()
        return [(one.step, one.replica, one.reason) for one in actions]


BEGINS = [(REPLACE, A, RemedyReason.ANOMALY)]


@pytest.mark.parametrize(
    ("act_on", "acts"),
    [
        ({Trigger.TIMEOUT}, {TIMEOUT, STUCK}),
        ({Trigger.LEAK}, {LEAK}),
        ({Trigger.SICK_EDGE}, {SICK, AnomalyKind.SICK_EDGE_LATENCY}),
        (set(Trigger), set(TRIGGERS)),
        (set(), set()),
    ],
)
def test_1_only_anomalies_to_act_on_lead_to_anything(act_on: set[Trigger], acts: set[AnomalyKind]) -> None:
    assert {kind for kind in AnomalyKind if Case(act_on=act_on).found(kind, A)} == acts
    assert AnomalyKind.SILENT_REPLICA not in TRIGGERS  # `ReplicaHangs` decides on these


def test_2_a_replica_that_does_not_serve_is_recovery_s() -> None:
    case = Case()
    case.down.add(A)
    assert case.found(LEAK, A) == []
    assert case.pass_(50) == []
    case.down.clear()
    assert case.pass_(1) == BEGINS


def test_3_one_is_replaced_at_a_time_and_the_longest_waiting_next() -> None:
    case = Case()
    assert case.found(LEAK, A) == BEGINS
    assert case.found(LEAK, ELSEWHERE) == []
    assert case.found(LEAK, Replica(2, 0)) == []
    assert case.found(LEAK, A) == []  # it is being replaced
    assert case.ended(A, ReplaceOutcome.REPLACED) == []
    assert case.pass_(0) == [(REPLACE, ELSEWHERE, RemedyReason.ANOMALY)]
    assert case.remedies.replacing == ELSEWHERE


@pytest.mark.parametrize("outcome", [ReplaceOutcome.REPLACED, ReplaceOutcome.DIED, ReplaceOutcome.NOT_STARTED])
def test_4_a_stage_rests_after_a_replacement(outcome: ReplaceOutcome) -> None:
    case = Case()
    case.found(LEAK, A)
    case.ended(A, outcome)
    assert case.found(SICK, B) == []
    assert case.pass_(99) == []
    assert case.pass_(1) == [(REPLACE, B, RemedyReason.ANOMALY)]


def test_5_a_replica_is_replaced_only_so_often() -> None:
    case = Case(max_restarts=2, window_seconds=1000.0)
    for _ in range(2):
        assert case.found(LEAK, A) == BEGINS
        case.ended(A, ReplaceOutcome.REPLACED)
        case.pass_(200)
    assert case.found(LEAK, A) == [(LEAVE, A, RemedyReason.BUDGET)]
    assert case.pass_(500) == []
    assert case.found(LEAK, B) == [(REPLACE, B, RemedyReason.ANOMALY)]  # each has its own budget
    case.ended(B, ReplaceOutcome.REPLACED)
    case.pass_(500)  # the first attempt is long ago
    assert case.found(LEAK, A) == BEGINS


@pytest.mark.parametrize(
    ("kind", "finished", "follows"),
    [
        (TIMEOUT, 0, [(TERMINATE, A, RemedyReason.NOT_EMPTY)]),
        (STUCK, 0, [(TERMINATE, A, RemedyReason.NOT_EMPTY)]),
        (TIMEOUT, 1, [(LEAVE, A, RemedyReason.STILL_WORKS)]),
        (LEAK, 0, [(LEAVE, A, RemedyReason.STILL_WORKS)]),
        (SICK, 0, [(LEAVE, A, RemedyReason.STILL_WORKS)]),
    ],
)
def test_7_one_that_does_not_become_empty_is_ended_if_nothing_moves_there(
    kind: AnomalyKind, finished: int, follows: list[Any]
) -> None:
    case = Case()
    case.found(kind, A)
    case.remedies.finished(B)
    for _ in range(finished):
        case.remedies.finished(A)
    assert case.ended(A, ReplaceOutcome.NOT_EMPTY) == follows
    again = BEGINS if follows[0][0] is LEAVE else []
    assert case.pass_(100) == again  # what still works is tried again after the cool-down


def test_8_what_was_found_long_ago_says_nothing_any_more() -> None:
    case = Case(window_seconds=200.0)
    case.down.add(A)
    case.found(LEAK, A)
    assert case.pass_(300) == []
    assert case.pass_(1) == [(LEAVE, A, RemedyReason.OUTDATED)]
    case.down.clear()
    assert case.pass_(1) == []


def test_9_a_dry_run_says_what_it_would_do_and_does_nothing() -> None:
    case = Case(dry_run=True, max_restarts=2, window_seconds=1000.0)
    would = [(RemedyStep.WOULD_REPLACE, A, RemedyReason.ANOMALY)]
    assert case.found(TIMEOUT, A) == would
    assert case.remedies.replacing is None
    assert case.found(LEAK, A) == []  # the stage rests
    assert case.pass_(100) == would
    case.pass_(100)
    assert case.found(LEAK, A) == [(LEAVE, A, RemedyReason.BUDGET)]


def test_whatever_happens_replacements_are_within_their_bounds() -> None:
    rng, replicas = Random(0), [Replica(stage, index) for stage in range(2) for index in range(2)]
    case = Case(max_restarts=2, window_seconds=250.0, cooldown_seconds=60.0)
    begun: list[tuple[float, Replica]] = []
    for _ in range(5000):
        replica = rng.choice(replicas)
        match rng.randrange(5):
            case 0:
                found = case.found(rng.choice([LEAK, TIMEOUT, SICK]), replica)
            case 1:
                found = case.ended(case.remedies.replacing or replica, rng.choice(list(ReplaceOutcome)))
            case 2:
                case.down ^= {replica}
                found = []
            case 3:
                case.remedies.finished(replica)
                found = []
            case _:
                found = case.pass_(rng.uniform(0, 60))
        for step, which, _ in found:
            if step is REPLACE:
                assert which not in case.down
                begun.append((case.now, which))
            if step is TERMINATE:
                assert begun[-1][1] == which
    assert len(begun) > 50
