"""Decide on replicas that die, come back and move."""

import math
from collections import deque
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.monitor.recovery.events import (
    Action,
    Cleared,
    Died,
    Draining,
    Incident,
    IncidentKind,
    Joined,
    Left,
    Record,
    Replica,
    ReplicaEvent,
    Restart,
    Restarted,
    RestartFailed,
    Stays,
    Suspected,
)
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions
from vllm_omni_sched.monitor.recovery.placement import Placement
from vllm_omni_sched.monitor.recovery.state import LIVE, SERVING, Phase, ReplicaState


class Replicas:
    """Rules 1 and 6 of `Recovery`: the phases of replicas, and their restarts.

    Args:
        watched: the replicas.
        placement: is told of requests whose replica died.
        rng: random source for the jitter.
    """

    def __init__(
        self, watched: dict[Replica, ReplicaState], placement: Placement, options: RecoveryOptions, rng: Random
    ) -> None:
        self.history: deque[Incident] = deque(maxlen=options.history)
        self._watched, self._placement, self._options, self._rng = watched, placement, options, rng

    def happened(self, event: ReplicaEvent, now: float, actions: list[Action]) -> None:
        watched = self._watched.get(event.replica)
        if watched is None:
            if isinstance(event, Joined):
                watched = self._watched[event.replica] = ReplicaState(event.replica, away=event.away)
                self._record(watched, IncidentKind.MOVED_IN, now, actions, event.cause)
            elif isinstance(event, RestartFailed):
                watched = self._watched[event.replica] = ReplicaState(event.replica)
                self._died(watched, event.cause, now, actions)
            return
        match event:
            case Suspected(_, cause) if watched.phase in LIVE:
                watched.phase = Phase.SUSPECT
                self._record(watched, IncidentKind.SUSPECTED, now, actions, cause)
            case Cleared() if watched.phase is Phase.SUSPECT:
                watched.phase = Phase.HEALTHY
                self._record(watched, IncidentKind.CLEARED, now, actions)
            case Died(_, cause) if watched.phase in SERVING:
                self._died(watched, cause, now, actions)
            case RestartFailed(_, cause) if watched.phase is Phase.RESTARTING:
                self._restart_failed(watched, cause, now, actions)
            case Restarted() if watched.phase is Phase.RESTARTING:
                watched.phase, watched.wake = Phase.BACK, math.inf
                self._record(watched, IncidentKind.BACK, now, actions)
            case Joined(_, cause, away) if watched.phase not in SERVING and watched.phase is not Phase.RESTARTING:
                watched.phase, watched.wake = Phase.BACK, math.inf  # somebody else has started it
                watched.away = away
                self._record(watched, IncidentKind.MOVED_IN, now, actions, cause)
            case Draining() if watched.phase in LIVE:
                watched.phase = Phase.DRAINING
                self._record(watched, IncidentKind.DRAINING, now, actions)
            case Stays(_, cause) if watched.phase is Phase.DRAINING:
                watched.phase = Phase.HEALTHY
                self._record(watched, IncidentKind.STAYED, now, actions, cause)
            case Left(_, cause) if watched.phase is Phase.DRAINING and not watched.requests:
                del self._watched[event.replica]
                self._record(watched, IncidentKind.MOVED_AWAY, now, actions, cause)
            case _:
                pass

    def _died(self, watched: ReplicaState, cause: str, now: float, actions: list[Action]) -> None:
        victims = tuple(watched.requests)
        watched.requests.clear()
        watched.failures = 0
        watched.cause = cause
        self._record(watched, IncidentKind.DIED, now, actions, cause, len(victims))
        self._placement.interrupted(victims, now, actions)
        self._restart(watched, now, actions)

    def _restart_failed(self, watched: ReplicaState, cause: str, now: float, actions: list[Action]) -> None:
        watched.failures += 1
        watched.cause = cause
        self._record(watched, IncidentKind.RESTART_FAILED, now, actions, cause)
        self._restart(watched, now, actions)

    def _restart(self, watched: ReplicaState, now: float, actions: list[Action]) -> None:
        phase = watched.begin_restart(now, self._options, self._rng)
        if phase is Phase.RESTARTING:
            self._record(watched, IncidentKind.RESTARTING, now, actions)
            actions.append(Restart(watched.replica))
        elif phase in (Phase.GIVEN_UP, Phase.DEAD):
            self._record(watched, IncidentKind.GIVEN_UP, now, actions, watched.outage(now, self._options))

    def tick(self, now: float, actions: list[Action]) -> None:
        for watched in self._watched.values():
            if now < watched.wake:
                continue
            if watched.phase is Phase.AWAITED:
                watched.phase, watched.wake = Phase.GIVEN_UP, math.inf
                self._record(watched, IncidentKind.GIVEN_UP, now, actions, "its host has not brought it back")
            else:  # its back-off is over, or the circuit closes for one attempt
                watched.restart(now)
                self._record(watched, IncidentKind.RESTARTING, now, actions)
                actions.append(Restart(watched.replica))

    def _record(
        self,
        watched: ReplicaState,
        kind: IncidentKind,
        now: float,
        actions: list[Action],
        cause: str = "",
        requests: int = 0,
    ) -> None:
        incident = Incident(now, watched.replica, kind, cause, requests)
        self.history.append(incident)
        actions.append(Record(incident))
