"""Decide what follows from an anomaly of a replica that still serves: it is replaced, or ended, or left alone."""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from vllm_omni_sched.monitor.anomaly.finding import AnomalyKind
from vllm_omni_sched.monitor.recovery.events import Replica

BUSY_SECONDS = 5.0
"""Pause of a stage after a replacement that could not begin because something else was being moved."""


class Trigger(str, Enum):
    """Anomaly that may lead to a remedy; the values of option `runtime.recovery.act_on`."""

    TIMEOUT = "timeout"  # a request is in the stage for too long, or the queue of the stage is stuck
    LEAK = "leak"  # the memory of the replica grows whatever its load
    SICK_EDGE = "sick_edge"  # the transfers of the replica fail or are slow


TRIGGERS: Mapping[AnomalyKind, Trigger] = {
    AnomalyKind.STAGE_TIMEOUT: Trigger.TIMEOUT,
    AnomalyKind.STUCK_QUEUE: Trigger.TIMEOUT,
    AnomalyKind.MEMORY_LEAK: Trigger.LEAK,
    AnomalyKind.SICK_EDGE_ERRORS: Trigger.SICK_EDGE,
    AnomalyKind.SICK_EDGE_LATENCY: Trigger.SICK_EDGE,
}
"""Silent replicas are not here: `ReplicaHangs` decides on them."""


class RemedyStep(str, Enum):
    """What follows; also the kind of the incident and of the entry in the journal."""

    REPLACE = "replacing"  # the replica gets no new requests, and is stopped and started again when it is empty
    TERMINATE = "terminating"  # its processes are killed; recovery starts it again and runs its requests elsewhere
    WOULD_REPLACE = "would_replace"  # with `dry_run`: nothing is done
    LEAVE = "left_alone"


class RemedyReason(str, Enum):
    """Reason of a step."""

    ANOMALY = "anomaly"  # it is one to act on
    NOT_EMPTY = "not_empty"  # it was drained in vain while nothing on it finished
    STILL_WORKS = "still_works"  # it was drained in vain, but requests finish there
    BUDGET = "budget"  # it was replaced too often lately
    UNABLE = "unable"  # the driver cannot replace it
    NOT_STARTED = "not_started"  # the replacement did not start; the old one runs again, or recovery has it
    OUTDATED = "outdated"  # the anomaly was so long ago that it says nothing any more


class ReplaceOutcome(str, Enum):
    """How a replacement ended."""

    REPLACED = "replaced"
    NOT_EMPTY = "not_empty"  # it could not be emptied in time, and stays
    DIED = "died"  # before it was empty; recovery has it
    NOT_STARTED = "not_started"
    BUSY = "busy"  # it did not begin: something else is being moved
    UNABLE = "unable"  # it did not begin, and never will


class RemedyAction(NamedTuple):
    """A step to take with a replica."""

    step: RemedyStep
    replica: Replica
    trigger: Trigger
    reason: RemedyReason

    @property
    def cause(self) -> str:
        """Return trigger and reason in words, for logs."""
        return f"{self.trigger.value}, {self.reason.value}"


@dataclass(frozen=True)
class RemedyOptions:
    """Which anomalies are acted on, and how often; times in seconds.

    ``dry_run``: decide, but do nothing. ``cooldown_seconds``: pause of a stage after a replacement of one of its
    replicas. ``max_restarts``: most replacements of one replica within ``window_seconds``.
    """

    act_on: Collection[Trigger] = ()
    dry_run: bool = False
    cooldown_seconds: float = 300.0
    max_restarts: int = 3
    window_seconds: float = 300.0


@dataclass
class _Wanted:
    """A replica that is to be replaced."""

    trigger: Trigger
    since: float


@dataclass
class _Replacing:
    replica: Replica
    wanted: _Wanted
    finished: int = 0  # requests that have finished there since it began


class Remedies:
    """Replaces replicas with an anomaly, one at a time and not too often.

    1. Only anomalies in ``act_on`` lead to anything. Each concerns one replica.
    2. A replica that does not serve (dead, starting, drained, or suspected of hanging) is not touched: recovery and the
       detection of hangs decide on it. The anomaly is kept until it serves again.
    3. One replica is replaced at a time in the whole pipeline, the one that has waited longest first.
    4. After a replacement, however it ended, no replica of the stage is replaced for ``cooldown_seconds``.
    5. A replica that was replaced ``max_restarts`` times within ``window_seconds`` is left alone (`BUDGET`). It needs a
       new anomaly after that.
    6. A replacement is graceful: the replica gets no new requests, and is stopped when it is empty.
    7. If it does not become empty, it stays. After a time-out, if nothing on it finished while it was drained, it is
       ended (`NOT_EMPTY`): recovery starts it again, and runs its requests on other replicas. Otherwise requests
       progress there; it is left alone (`STILL_WORKS`), and tried again after the cool-down.
    8. An anomaly that could not be acted on within ``window_seconds`` and ``cooldown_seconds`` is dropped (`OUTDATED`).
    9. With ``dry_run`` the first step is returned as what would be done, and counts against the budget. Nothing is
       known about the second.

    Args:
        serves: whether a replica serves.
    """

    def __init__(self, options: RemedyOptions, serves: Callable[[Replica], bool]) -> None:
        self._options, self._serves = options, serves
        self._wanted: dict[Replica, _Wanted] = {}  # the longest waiting first
        self._replacing: _Replacing | None = None
        self._attempts: dict[Replica, deque[float]] = {}
        self._rests: dict[int, float] = {}  # by stage: until when none of its replicas is replaced

    @property
    def replacing(self) -> Replica | None:
        """Return the replica that is being replaced."""
        return None if self._replacing is None else self._replacing.replica

    def found(self, kind: AnomalyKind, replica: Replica, now: float) -> list[RemedyAction]:
        """Record an anomaly of a replica that begins, and return what to do now."""
        trigger = TRIGGERS.get(kind)
        if trigger is None or trigger not in self._options.act_on:
            return []
        if replica == self.replacing or replica in self._wanted:
            return []
        self._wanted[replica] = _Wanted(trigger, now)
        return self.tick(now)

    def tick(self, now: float) -> list[RemedyAction]:
        """Return what to do now."""
        options, actions = self._options, []
        for replica, wanted in list(self._wanted.items()):
            if now - wanted.since > options.window_seconds + options.cooldown_seconds:
                del self._wanted[replica]
                actions.append(RemedyAction(RemedyStep.LEAVE, replica, wanted.trigger, RemedyReason.OUTDATED))
                continue
            if self._replacing is not None or now < self._rests.get(replica.stage, -math.inf):
                continue
            if not self._serves(replica):
                continue
            del self._wanted[replica]
            actions.append(self._begin(replica, wanted, now))
        return actions

    def _begin(self, replica: Replica, wanted: _Wanted, now: float) -> RemedyAction:
        trigger = wanted.trigger
        options, attempts = self._options, self._attempts.setdefault(replica, deque())
        while attempts and attempts[0] <= now - options.window_seconds:
            attempts.popleft()
        if len(attempts) >= options.max_restarts:
            return RemedyAction(RemedyStep.LEAVE, replica, trigger, RemedyReason.BUDGET)
        attempts.append(now)
        if options.dry_run:
            self._rests[replica.stage] = now + options.cooldown_seconds
            return RemedyAction(RemedyStep.WOULD_REPLACE, replica, trigger, RemedyReason.ANOMALY)
        self._replacing = _Replacing(replica, wanted)
        return RemedyAction(RemedyStep.REPLACE, replica, trigger, RemedyReason.ANOMALY)

    def finished(self, replica: Replica) -> None:
        """Record that a request has finished on a replica."""
        if self._replacing is not None and self._replacing.replica == replica:
            self._replacing.finished += 1

    def ended(self, replica: Replica, outcome: ReplaceOutcome, now: float) -> list[RemedyAction]:
        """Record how a replacement has ended; return what follows. One that was not begun changes nothing."""
        ended = self._replacing
        if ended is None or ended.replica != replica:
            return []
        self._replacing, trigger = None, ended.wanted.trigger
        if outcome is ReplaceOutcome.BUSY:  # as if it had not begun
            self._attempts[replica].pop()
            self._wanted[replica] = ended.wanted
            self._rests[replica.stage] = max(self._rests.get(replica.stage, -math.inf), now + BUSY_SECONDS)
            return []
        self._rests[replica.stage] = now + self._options.cooldown_seconds
        match outcome:
            case ReplaceOutcome.NOT_EMPTY if trigger is Trigger.TIMEOUT and not ended.finished:
                return [RemedyAction(RemedyStep.TERMINATE, replica, trigger, RemedyReason.NOT_EMPTY)]
            case ReplaceOutcome.NOT_EMPTY:
                self._wanted[replica] = ended.wanted
                return [RemedyAction(RemedyStep.LEAVE, replica, trigger, RemedyReason.STILL_WORKS)]
            case ReplaceOutcome.UNABLE:
                return [RemedyAction(RemedyStep.LEAVE, replica, trigger, RemedyReason.UNABLE)]
            case ReplaceOutcome.NOT_STARTED:
                return [RemedyAction(RemedyStep.LEAVE, replica, trigger, RemedyReason.NOT_STARTED)]
        return []

    def validate(self) -> None:
        """Check the laws of what is known; O(n), for tests.

        Raises:
            AssertionError: one is broken.
        """
        assert self.replacing not in self._wanted, f"{self.replacing} is being replaced, and is to be replaced"
        assert not (self._replacing and self._options.dry_run), "a dry run replaces nothing"
        for replica, attempts in self._attempts.items():
            assert len(attempts) <= self._options.max_restarts, f"{replica} was replaced too often"
            assert list(attempts) == sorted(attempts), f"attempts of {replica} are not in order"
