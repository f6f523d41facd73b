"""Recovery of replicas and of their requests."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.monitor.recovery.events import (
    Aborted,
    Action,
    Dispatched,
    Event,
    Finished,
    Incident,
    OutputLost,
    Recalled,
    Replica,
    ReplicaEvent,
    Tick,
)
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions
from vllm_omni_sched.monitor.recovery.placement import Placement
from vllm_omni_sched.monitor.recovery.replica import LIVE, Phase, Watched
from vllm_omni_sched.monitor.recovery.replicas import Replicas


class Recovery:
    """Restarts replicas that died, and finds another place for what they had in flight.

    1. A dead replica is restarted at once; after a failed attempt with back-off; not at all while
       ``max_restarts`` attempts lie within ``window_seconds`` (the circuit is open).
    2. Its requests go at once to the live replica of the stage with the least in flight that has room; else they
       wait for one, first come first served, up to ``max_wait_seconds``; else they fail. When no replica of the stage
       is left or coming, they fail at once.
    3. A request goes on where it was; a finished stage runs again only if its output is held no longer (`plan_rerun`).
       One whose input was lost on its way is taken back from where it waits for it (`Recalled`), and goes on likewise.
    4. A request in flight at ``poison_deaths`` deaths in a row fails, rather than kill one replica after the other.
       Of those that the next death would condemn at most ``last_chance_together`` share a replica, so that
       one of them takes few others with it.
    5. Every dispatch has a number. An answer counts if it is that of the last one, and that once; so each request
       leaves once, by `Deliver` of a final answer, `Fail`, or `Aborted`.
    6. A replica that is to be moved (`Draining`) gets no request that lost its own, and leaves (`Left`) only empty;
       to die before is to die as others do.
    7. A request that is in several stages at a time has an entry in each; how often it moved counts for all of them.

    An entry is at one stage at a time. An event about what is unknown changes nothing, and neither does one that makes
    no sense in the phase of the replica: it cannot die twice.

    Args:
        replicas: each with how many requests it may hold (``math.inf``: any number).
        sources: the stages each stage reads.
        rng: for the jitter.
    """

    def __init__(
        self,
        replicas: Mapping[Replica, float],
        sources: Mapping[int, Sequence[int]],
        options: RecoveryOptions,
        rng: Random,
    ) -> None:
        self.options = options
        self._watched = {replica: Watched(replica, limit) for replica, limit in sorted(replicas.items())}
        self._placement = Placement(self._watched, sources, options)
        self._replicas = Replicas(self._watched, self._placement, options, rng)
        self._ledger = self._placement.ledger

    @property
    def history(self) -> deque[Incident]:
        """The last incidents, oldest first."""
        return self._replicas.history

    def __len__(self) -> int:
        """Requests that have not left."""
        return len(self._ledger.entries)

    def phase(self, replica: Replica) -> Phase:
        """Raises: KeyError: there is no such replica."""
        return self._watched[replica].phase

    def serves(self, replica: Replica) -> bool:
        """Whether it is there and well."""
        return replica in self._watched and self._watched[replica].phase in LIVE

    def in_flight(self, replica: Replica) -> tuple[str, ...]:
        """The requests it holds, first dispatched first."""
        return tuple(self._watched[replica].requests)

    def attempt(self, request_id: str) -> int:
        """The number of the last dispatch of a request; 0: unknown."""
        entry = self._ledger.entries.get(request_id)
        return entry.attempt if entry else 0

    def next_wake(self) -> float:
        """When a `Tick` is wanted; ``inf``: not before another event."""
        phases = (one.wake for one in self._watched.values())
        waits = (entry.until for entry in self._ledger.waiting.values())
        return min(min(phases, default=math.inf), min(waits, default=math.inf))

    def coming(self, stage: int) -> bool:
        """Whether some replica of the stage serves or may serve again soon."""
        return self._placement.coming(stage)

    def on_event(self, event: Event, now: float) -> tuple[Action, ...]:
        """What to do about it, in this order.

        Raises:
            ValueError: a request was dispatched to a replica that does not exist, or that is in flight already.
        """
        actions: list[Action] = []
        match event:
            case Dispatched():
                self._placement.dispatched(event, now, actions)
            case Finished():
                self._placement.finished(event, actions)
            case Aborted(request_id):
                self._placement.leave(request_id)
            case OutputLost(request_id, stage):
                self._placement.output_lost(request_id, stage)
            case Recalled(request_id):
                self._placement.recalled(request_id, now, actions)
            case Tick():
                self._replicas.tick(now, actions)
            case ReplicaEvent():
                self._replicas.happened(event, now, actions)
            case _:
                raise TypeError(f"no event of recovery: {event!r}")
        self._placement.place_waiting(now, actions)
        return tuple(actions)
