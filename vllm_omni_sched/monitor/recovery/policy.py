"""Recover dead replicas and their requests."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.monitor.recovery.events import (
    Aborted,
    Action,
    Dispatched,
    Event,
    FailReason,
    Finished,
    Incident,
    OutputLost,
    Recalled,
    Replica,
    ReplicaEvent,
    Tick,
    Unsent,
)
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions
from vllm_omni_sched.monitor.recovery.placement import Placement
from vllm_omni_sched.monitor.recovery.replicas import Replicas
from vllm_omni_sched.monitor.recovery.state import LIVE, SERVING, Phase, ReplicaState


class Recovery:
    """Restarts dead replicas, and dispatches their requests to others.

    1. A dead replica is restarted at once; after a failed attempt, with back-off; not at all while
       ``max_restarts`` attempts lie within ``window_seconds`` (the circuit is open).
    2. Its requests go at once to the live replica of the stage with the fewest in flight that has room. Otherwise they
       wait for one, first come first served, up to ``max_wait_seconds``, and then fail. When no replica of the stage
       serves or is being restarted, they fail at once.
    3. A request resumes at its stage; a finished stage runs again only if its output is no longer held (`plan_rerun`).
       A request whose input was lost on its way is withdrawn from its replica (`Recalled`), and resumes likewise.
    4. A request in flight at ``poison_deaths`` deaths in a row fails, rather than kill one replica after another.
       Of the requests that would fail at the next death, at most ``last_chance_together`` share a replica, so that
       a poisonous one takes few others with it.
    5. Every dispatch has a number. An answer counts once, and only for the last dispatch; so each request
       leaves once, by `Deliver` of a final answer, `Fail`, or `Aborted`.
    6. A replica that is to be moved (`Draining`) gets no redispatched request, and leaves (`Left`) only when empty;
       if it dies before, it is treated like any other.
    7. A request that is in several stages at a time has an entry in each; its redispatches are counted over all.
    8. Requests in the queue of a stage that no replica serves fail at once when none is being restarted, and otherwise
       ``max_wait_seconds`` after they came, or after the stage lost its last replica if that was later (`unserved`).
    9. A replica of another host (``away``) is not restarted: that host does so, or another replica joins. For
       ``window_seconds`` after its death it counts as coming, like one that is being restarted.

    An entry is at one stage at a time. An event about an unknown replica or request changes nothing, and neither does
    one that is impossible in the replica's phase: a replica cannot die twice.

    Args:
        replicas: with the number of requests that each may hold (``math.inf``: any number).
        sources: the stages that each stage reads.
        rng: random source for the jitter.
    """

    def __init__(
        self,
        replicas: Mapping[Replica, float],
        sources: Mapping[int, Sequence[int]],
        options: RecoveryOptions,
        rng: Random,
    ) -> None:
        self.options = options
        self._watched = {replica: ReplicaState(replica, limit) for replica, limit in sorted(replicas.items())}
        self._placement = Placement(self._watched, sources, options)
        self._replicas = Replicas(self._watched, self._placement, options, rng)
        self._ledger = self._placement.ledger

    def watch(self, replica: Replica, away: bool = False) -> None:
        """Watch a replica that has served from the start. ``away``: another host has started it."""
        self._watched.setdefault(replica, ReplicaState(replica, away=away))

    def watches(self, replica: Replica) -> bool:
        """Return whether the replica is known, dead or alive."""
        return replica in self._watched

    def restarts(self, replica: Replica) -> bool:
        """Return whether the replica is being restarted."""
        return replica in self._watched and self._watched[replica].phase is Phase.RESTARTING

    @property
    def history(self) -> deque[Incident]:
        """Return the last incidents, oldest first."""
        return self._replicas.history

    def __len__(self) -> int:
        """Return the number of requests that have not left."""
        return len(self._ledger.entries)

    def phase(self, replica: Replica) -> Phase:
        """Return the phase of a replica.

        Raises:
            KeyError: there is no such replica.
        """
        return self._watched[replica].phase

    def serves(self, replica: Replica) -> bool:
        """Return whether the replica is known and live."""
        return replica in self._watched and self._watched[replica].phase in LIVE

    def in_flight(self, replica: Replica) -> tuple[str, ...]:
        """Return the requests that the replica holds, first dispatched first."""
        return tuple(self._watched[replica].requests)

    def attempt(self, request_id: str) -> int:
        """Return the number of the last dispatch of a request; 0 if it is unknown."""
        entry = self._ledger.entries.get(request_id)
        return entry.attempt if entry else 0

    def next_wake(self) -> float:
        """Return when a `Tick` is needed; ``inf`` if not before another event."""
        phases = (one.wake for one in self._watched.values())
        waits = (entry.until for entry in self._ledger.waiting.values())
        return min(min(phases, default=math.inf), min(waits, default=math.inf))

    def coming(self, stage: int) -> bool:
        """Return whether a replica of the stage serves or may serve again soon."""
        return self._placement.coming(stage)

    def outage(self, stage: int, now: float) -> str:
        """Return why the replicas of a stage do not serve, and until when."""
        down = [one for one in self._watched.values() if one.replica.stage == stage and one.phase not in SERVING]
        return "; ".join(f"replica {one.replica.index} {one.outage(now, self.options)}" for one in down)

    def unserved(self, expected: bool, empty_since: float, now: float) -> FailReason | None:
        """Return why requests in the queue of a stage without a replica fail (rule 8); None: all of them wait.

        Args:
            expected: whether a replica of the stage is being started or restarted.
            empty_since: when the last replica was lost.
        """
        if not expected:
            return FailReason.NO_REPLICA
        return FailReason.WAITED if now >= empty_since + self.options.max_wait_seconds else None

    def on_event(self, event: Event, now: float) -> tuple[Action, ...]:
        """Return the actions for the event, in order.

        Raises:
            ValueError: a request was dispatched to a replica that does not exist, or is in flight already.
        """
        actions: list[Action] = []
        match event:
            case Dispatched():
                self._placement.dispatched(event, now, actions)
            case Finished():
                self._placement.finished(event, actions)
            case Aborted(request_id):
                self._placement.leave(request_id)
            case Unsent(request_id):
                self._placement.unsent(request_id)
            case OutputLost(request_id, stage):
                self._placement.output_lost(request_id, stage)
            case Recalled(request_id):
                self._placement.recalled(request_id, now, actions)
            case Tick():
                self._replicas.tick(now, actions)
            case ReplicaEvent():
                self._replicas.happened(event, now, actions)
            case _:
                raise TypeError(f"not an event of recovery: {event!r}")
        self._placement.place_waiting(now, actions)
        return tuple(actions)

    def validate(self) -> None:
        """Check that each request is in one place, and each place has its requests; O(n), for tests.

        Raises:
            AssertionError: it is not.
        """
        entries = self._ledger.entries
        for replica, watched in self._watched.items():
            for name in watched.requests:
                assert name in entries, f"{replica} has {name}, which has left"
                assert entries[name].replica == replica, f"{replica} has {name}, which is at {entries[name].replica}"
            assert not watched.requests or watched.phase in SERVING, f"{replica} is {watched.phase} and has requests"
        for name, entry in entries.items():
            waits = name in self._ledger.waiting
            assert not (waits and entry.replica), f"{name} waits and is at {entry.replica}"
            if entry.replica is not None:
                assert name in self._watched[entry.replica].requests, f"{name} is not at {entry.replica}"
        assert self._ledger.waiting.keys() <= entries.keys(), "a request that has left waits"
