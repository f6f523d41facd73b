"""Decide which replicas count as hanging, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.graph.stages import StageGraph
from vllm_omni_sched.monitor.anomaly.silence import Silence

COMPUTES = 0.05  # fraction of a processor above which a replica counts as computing
NOTICED_SECONDS = 5.0  # in which the end of killed processes is noticed; after that, the driver reports the death


class HangStep(str, Enum):
    """What follows from the state of a replica."""

    REPORT = "report"  # it hangs; nothing else is done
    SUSPECT = "suspect"  # it hangs, and gets no new work
    TRUST = "trust"  # it no longer hangs, and gets new work again
    KILL = "kill"  # it still hangs: its processes are killed
    FORGET = "forget"  # it was suspected, and is gone or was replaced


class HangAction(NamedTuple):
    """A step to take with a replica.

    ``subject``: its name. ``seconds``: of silence (`REPORT`, `SUSPECT`), or since it was suspected (`KILL`), else 0.
    """

    step: HangStep
    stage_id: int
    replica_id: int
    subject: str
    seconds: float = 0.0


class ReplicaWork(NamedTuple):
    """A request that runs on a replica.

    ``sent``: whether its input was sent. ``upstream``: whether an earlier stage still has it. ``expected_seconds``: the
    expected time of the request in the stage.
    """

    sent: bool
    upstream: bool
    expected_seconds: float


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A live replica, as the driver sees it. The functions inspect it, and are called only if the answer matters.

    ``client``: what it is reached by; a replacement has another one. ``local``: whether it has processes on this host.
    ``owes``: whether an output that it has reported may not have been sent to the next stage. ``stopped``: whether one
    of its processes is stopped. ``cpu_seconds``: the processor time that its processes have used, None if unknown.
    """

    stage_id: int
    replica_id: int
    client: object
    local: bool
    works: tuple[ReplicaWork, ...]
    owes: Callable[[], bool]
    stopped: Callable[[], bool]
    cpu_seconds: Callable[[], float | None]


@dataclass(slots=True)
class _Watched:
    client: object
    used: tuple[float, float] | None = None  # time and processor time of the last reading
    since: float | None = None  # when it was found to hang
    suspected: bool = False
    killed: bool = False


class ReplicaHangs:
    """Finds replicas that have work but send and compute nothing, and decides what is done with them.

    1. Checks are ``interval_seconds`` apart.
    2. The work of a replica counts once it was sent and the earlier stages are done with it: in async-chunk mode, a
       stage that is fed by a hanging one does not hang.
    3. A replica has work, too, while one of its processes is stopped and an output that it has reported may not have
       been sent to the next stage: it sends outputs after it has reported them. Unless stopped it is not checked for
       that, because a replica that has sent everything is as silent.
    4. A replica without processes on this host is not checked.
    5. Processor time is read once a replica with work has been silent for ``interval_seconds``. It computes if it has
       used more than `COMPUTES` of a processor since the last reading, if this is the first one, or if the time is
       unknown.
    6. A replica hangs if `Silence` says so.
    7. A replica that begins to hang is reported once. With ``hang_seconds``, it also gets no new work (`SUSPECT`).
    8. A suspected replica that no longer hangs, because it sends or computes something or has no more work, gets new
       work again (`TRUST`).
    9. If a suspected replica hangs for ``hang_seconds`` more, its processes are killed (`KILL`), once. Nothing more is
       decided about it until it is gone. If its end is not noticed within `NOTICED_SECONDS`, the driver reports it.
    10. A replica that is gone, or that another client has replaced, is forgotten; if it was suspected, that ends
        (`FORGET`).

    The driver calls `check` with the live replicas when `is_due`, and `heard` for every message of a replica. This
    class reads no clock.

    Args:
        names: names of the stages by id.
        hang_seconds: how long a suspected replica may hang; None: replicas that hang are only reported.
        interval_seconds: time between two checks.
    """

    def __init__(
        self, names: Mapping[int, str], hang_seconds: float | None, interval_seconds: float, silence: Silence
    ) -> None:
        self.silence = silence
        self._names, self._ids = names, {name: stage_id for stage_id, name in names.items()}
        self._hang_seconds, self._interval_seconds = hang_seconds, interval_seconds
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._next = self._checked = float("-inf")

    @classmethod
    def of(cls, config: StageSchedConfig, graph: StageGraph) -> ReplicaHangs | None:
        """Return what the options ask for; None if hangs are not detected. Without recovery, they are only reported."""
        options, recovery = config.monitoring.anomaly, config.runtime.recovery
        if not (config.monitoring.enabled and options.enabled):
            return None
        silence = Silence(cap_seconds=options.max_stage_seconds)
        names = {stage.stage_id: str(stage) for stage in graph.stages}
        return cls(names, recovery.hang_seconds if recovery.enabled else None, options.interval_seconds, silence)

    def heard(self, stage_id: int, replica_id: int, now: float) -> None:
        """Record that a replica has sent a message."""
        self.silence.heard(self._names[stage_id], replica_id, now)

    def is_due(self, now: float) -> bool:
        """Return whether it is time for a check (rule 1)."""
        return now >= self._next

    def check(self, now: float, replicas: Iterable[ReplicaView]) -> list[HangAction]:
        """Return what to do, given all live replicas."""
        self._next, self._checked = now + self._interval_seconds, now
        live = {(view.stage_id, view.replica_id): view for view in replicas}
        actions = self._forget_missing(live)
        for key, view in live.items():
            self._observe(self._watched.setdefault(key, _Watched(view.client)), view, now)
        found = {
            (self._ids[one.subject.rpartition(" replica ")[0]], int(one.evidence["replica"])): one.evidence["seconds"]
            for one in self.silence.check(now)
        }
        for key, one in self._watched.items():
            if key not in found and not one.killed:
                if one.suspected:
                    actions.append(self._action(HangStep.TRUST, key))
                one.since, one.suspected = None, False
        for key, seconds in found.items():
            actions += self._hangs(key, seconds, now)
        return actions

    def _forget_missing(self, live: dict[tuple[int, int], ReplicaView]) -> list[HangAction]:
        actions = []
        for key, one in list(self._watched.items()):
            if key not in live or live[key].client is not one.client:
                del self._watched[key]
                self.silence.forget(self._names[key[0]], key[1])
                if one.suspected:
                    actions.append(self._action(HangStep.FORGET, key))
        return actions

    def _observe(self, one: _Watched, view: ReplicaView, now: float) -> None:
        name, replica_id = self._names[view.stage_id], view.replica_id
        fed = [work.expected_seconds for work in view.works if work.sent and not work.upstream]
        work = view.local and (bool(fed) or (view.owes() and view.stopped()))
        computes = False
        if work and self.silence.silent_seconds(name, replica_id, now) >= self._interval_seconds:
            computes = self._computes(one, view.cpu_seconds(), now)
        else:
            one.used = None
        expected = max(fed, default=0.0)
        self.silence.observe(name, replica_id, now, work=work, computes=computes, expected_seconds=expected)

    def _computes(self, one: _Watched, used: float | None, now: float) -> bool:
        before, one.used = one.used, None if used is None else (now, used)
        return used is None or before is None or used - before[1] > COMPUTES * (now - before[0])

    def _hangs(self, key: tuple[int, int], seconds: float, now: float) -> list[HangAction]:
        one, actions = self._watched[key], []
        if one.killed:
            return []
        if one.since is None:
            one.since, one.suspected = now, self._hang_seconds is not None
            step = HangStep.SUSPECT if one.suspected else HangStep.REPORT
            actions.append(self._action(step, key, seconds))
        if self._hang_seconds is not None and now - one.since >= self._hang_seconds:
            one.killed = True
            actions.append(self._action(HangStep.KILL, key, self._hang_seconds))
        return actions

    def _action(self, step: HangStep, key: tuple[int, int], seconds: float = 0.0) -> HangAction:
        return HangAction(step, *key, f"{self._names[key[0]]} replica {key[1]}", seconds)

    def validate(self) -> None:
        """Check the laws of what is known about each replica; O(n), for tests.

        Raises:
            AssertionError: one is broken.
        """
        for (stage_id, replica_id), one in self._watched.items():
            name = f"stage {stage_id} replica {replica_id}"
            assert one.suspected or not one.killed, f"{name} was killed without being suspected"
            assert not one.suspected or self._hang_seconds is not None, f"{name} is suspected, but only reports follow"
            assert not one.suspected or one.since is not None, f"{name} is suspected, but does not hang"
            assert one.since is None or one.since <= self._checked, f"{name} hangs since a check that is to come"
            assert one.used is None or one.used[0] == self._checked, f"{name} was not read at the last check"
