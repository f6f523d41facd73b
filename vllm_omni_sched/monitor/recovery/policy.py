"""Recovery of replicas and of their requests."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.monitor.recovery.events import (
    Aborted,
    Action,
    Cleared,
    Deliver,
    Died,
    Dispatched,
    Draining,
    Drop,
    Event,
    Fail,
    FailReason,
    Finished,
    Incident,
    IncidentKind,
    Joined,
    Left,
    OutputLost,
    Record,
    Redispatch,
    Replica,
    Restart,
    Restarted,
    RestartFailed,
    Stays,
    Suspected,
    Tick,
    Wait,
)
from vllm_omni_sched.monitor.recovery.ledger import Entry, Ledger
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions
from vllm_omni_sched.monitor.recovery.replica import LIVE, SERVING, Phase, Watched
from vllm_omni_sched.monitor.recovery.rerun import plan_rerun


class Recovery:
    """Restarts replicas that died, and finds another place for what they had in flight.

    1. A dead replica is restarted at once; after a failed attempt with back-off; not at all while
       ``max_restarts`` attempts lie within ``window_seconds`` (the circuit is open).
    2. Its requests go at once to the live replica of the stage with the least in flight that has room; else they
       wait for one, first come first served, up to ``max_wait_seconds``; else they fail. When no replica of the stage
       is left or coming, they fail at once.
    3. A request goes on where it was; a finished stage runs again only if its output is held no longer (`plan_rerun`).
    4. A request in flight at ``poison_deaths`` deaths in a row fails, rather than kill one replica after the other.
       Of those that the next death would condemn at most ``last_chance_together`` share a replica, so that
       one of them takes few others with it.
    5. Every dispatch has a number. An answer counts if it is that of the last one, and that once; so each request
       leaves once, by `Deliver` of a final answer, `Fail`, or `Aborted`.
    6. A replica that is to be moved (`Draining`) gets no request that lost its own, and leaves (`Left`) only empty;
       to die before is to die as others do.

    6. A request that is in several stages at a time has an entry in each; how often it moved counts for all of them.

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
        self.history: deque[Incident] = deque(maxlen=options.history)
        self._replicas = {replica: Watched(replica, limit) for replica, limit in sorted(replicas.items())}
        self._sources = sources
        self._rng = rng
        self._ledger = Ledger()

    def __len__(self) -> int:
        """Requests that have not left."""
        return len(self._ledger.entries)

    def phase(self, replica: Replica) -> Phase:
        """Raises: KeyError: there is no such replica."""
        return self._replicas[replica].phase

    def serves(self, replica: Replica) -> bool:
        """Whether it is there and well."""
        return replica in self._replicas and self._replicas[replica].phase in LIVE

    def in_flight(self, replica: Replica) -> tuple[str, ...]:
        """The requests it holds, first dispatched first."""
        return tuple(self._replicas[replica].requests)

    def attempt(self, request_id: str) -> int:
        """The number of the last dispatch of a request; 0: unknown."""
        entry = self._ledger.entries.get(request_id)
        return entry.attempt if entry else 0

    def next_wake(self) -> float:
        """When a `Tick` is wanted; ``inf``: not before another event."""
        phases = (one.wake for one in self._replicas.values())
        waits = (entry.until for entry in self._ledger.waiting.values())
        return min(min(phases, default=math.inf), min(waits, default=math.inf))

    def on_event(self, event: Event, now: float) -> tuple[Action, ...]:
        """What to do about it, in this order.

        Raises:
            ValueError: a request was dispatched to a replica that does not exist, or that is in flight already.
        """
        actions: list[Action] = []
        match event:
            case Dispatched():
                self._dispatched(event, now, actions)
            case Finished():
                self._finished(event, actions)
            case Aborted(request_id):
                self._leave(request_id)
            case OutputLost(request_id, stage):
                if request_id in self._ledger.entries:
                    self._ledger.entries[request_id].held.discard(stage)
            case Tick():
                self._tick(now, actions)
            case _:
                self._about_replica(event, now, actions)
        self._place_waiting(now, actions)
        return tuple(actions)

    # requests

    def _dispatched(self, event: Dispatched, now: float, actions: list[Action]) -> None:
        request_id, replica = event.request_id, event.replica
        if replica not in self._replicas:
            raise ValueError(f"request {request_id!r} was dispatched to {replica}, which does not exist")
        entry = self._ledger.enter(request_id, replica.stage, event.whole or request_id)
        if entry.replica is not None or request_id in self._ledger.waiting:
            raise ValueError(f"request {request_id!r} was dispatched to {replica} while it is in flight")
        entry.stage, entry.stages = replica.stage, (replica.stage,)
        watched = self._replicas[replica]
        if watched.phase in SERVING:
            self._give(entry, watched)
        else:  # it died while the request was on its way
            self._ledger.wait(entry, now + self.options.max_wait_seconds)

    def _finished(self, event: Finished, actions: list[Action]) -> None:
        entry = self._ledger.entries.get(event.request_id)
        if entry is None or entry.replica is None or entry.attempt != event.attempt:
            actions.append(Drop(event.request_id))
            return
        watched = self._replicas[entry.replica]
        if watched.phase is Phase.BACK:
            watched.phase, watched.failures = Phase.HEALTHY, 0
        watched.requests.pop(event.request_id)
        entry.replica, entry.deaths = None, 0
        entry.held.add(entry.stage)
        if event.final:
            self._ledger.leave(event.request_id)
        actions.append(Deliver(event.request_id))

    def _leave(self, request_id: str) -> None:
        entry = self._ledger.leave(request_id)
        if entry is not None and entry.replica is not None:
            self._replicas[entry.replica].requests.pop(request_id)

    def _give(self, entry: Entry, watched: Watched) -> None:
        entry.replica = watched.replica
        entry.attempt += 1
        watched.requests[entry.request_id] = None

    def _fail(self, entry: Entry, reason: FailReason, actions: list[Action]) -> None:
        self._leave(entry.request_id)
        actions.append(Fail(entry.request_id, reason))

    def _interrupted(self, entry: Entry, now: float, actions: list[Action]) -> None:
        """Its replica died: it waits, if only until the end of this event."""
        entry.deaths += 1
        if entry.deaths >= self.options.poison_deaths:
            self._fail(entry, FailReason.POISON, actions)
        elif self._ledger.redispatches[entry.whole] >= self.options.max_redispatches:
            self._fail(entry, FailReason.REDISPATCHES, actions)
        else:
            self._ledger.wait(entry, now + self.options.max_wait_seconds)

    def _place_waiting(self, now: float, actions: list[Action]) -> None:
        """Every waiting request that has a place gets it; who has waited before is not told so again."""
        for entry in tuple(self._ledger.waiting.values()):
            # Asked anew each time: an output may have been lost while it waited.
            stages = plan_rerun(entry.stage, self._sources, entry.held).stages
            target = self._place(entry, stages[0])
            if target is not None:
                self._ledger.stop_waiting(entry)
                entry.stages, entry.stage = stages, stages[0]
                self._ledger.redispatches[entry.whole] += 1
                self._give(entry, target)
                actions.append(Redispatch(entry.request_id, target.replica, entry.attempt, stages))
            elif now >= entry.until:
                self._fail(entry, FailReason.WAITED, actions)
            elif not self.coming(stages[0]):
                self._fail(entry, FailReason.NO_REPLICA, actions)
            elif not entry.told:
                entry.told = True
                actions.append(Wait(entry.request_id, entry.until))

    def _place(self, entry: Entry, stage: int) -> Watched | None:
        free = [
            one
            for one in self._replicas.values()
            if one.replica.stage == stage and one.phase in LIVE and len(one.requests) < one.limit
        ]
        if self._last_chance(entry):
            most = self.options.last_chance_together
            free = [one for one in free if self._condemned(one) < most]
        return min(free, key=lambda one: (len(one.requests), one.replica), default=None)

    def _last_chance(self, entry: Entry) -> bool:
        return 0 < entry.deaths == self.options.poison_deaths - 1

    def _condemned(self, watched: Watched) -> int:
        return sum(self._last_chance(self._ledger.entries[request_id]) for request_id in watched.requests)

    def coming(self, stage: int) -> bool:
        """Whether some replica of the stage serves or may serve again soon."""
        gone = (Phase.DEAD, Phase.GIVEN_UP)
        return any(one.replica.stage == stage and one.phase not in gone for one in self._replicas.values())

    # replicas

    def _about_replica(self, event: Event, now: float, actions: list[Action]) -> None:
        if isinstance(event, Joined):
            if event.replica not in self._replicas:
                watched = self._replicas[event.replica] = Watched(event.replica)
                self._record(watched, IncidentKind.MOVED_IN, now, actions, event.cause)
            return
        if not isinstance(event, Suspected | Cleared | Died | Restarted | RestartFailed | Draining | Stays | Left):
            raise TypeError(f"no event of recovery: {event!r}")
        known = self._replicas.get(event.replica)
        if known is None:
            return
        watched = known
        match event:
            case Suspected(_, cause) if watched.phase in LIVE:
                watched.phase, watched.wake = Phase.SUSPECT, now + self.options.suspect_seconds
                self._record(watched, IncidentKind.SUSPECTED, now, actions, cause)
            case Cleared() if watched.phase is Phase.SUSPECT:
                watched.phase, watched.wake = Phase.HEALTHY, math.inf
                self._record(watched, IncidentKind.CLEARED, now, actions)
            case Died(_, cause) if watched.phase in SERVING:
                self._died(watched, cause, now, actions)
            case Died(_, cause) | RestartFailed(_, cause) if watched.phase is Phase.RESTARTING:
                self._restart_failed(watched, cause, now, actions)
            case Restarted() if watched.phase is Phase.RESTARTING:
                watched.phase, watched.wake = Phase.BACK, math.inf
                self._record(watched, IncidentKind.BACK, now, actions)
            case Draining() if watched.phase in LIVE:
                watched.phase = Phase.DRAINING
                self._record(watched, IncidentKind.DRAINING, now, actions)
            case Stays(_, cause) if watched.phase is Phase.DRAINING:
                watched.phase = Phase.HEALTHY
                self._record(watched, IncidentKind.STAYED, now, actions, cause)
            case Left(_, cause) if watched.phase is Phase.DRAINING and not watched.requests:
                del self._replicas[event.replica]
                self._record(watched, IncidentKind.MOVED_AWAY, now, actions, cause)
            case _:
                pass

    def _died(self, watched: Watched, cause: str, now: float, actions: list[Action]) -> None:
        victims = [self._ledger.entries[request_id] for request_id in watched.requests]
        watched.requests.clear()
        # One that came back and died before it answered anything has not really come back.
        watched.failures = watched.failures + 1 if watched.phase is Phase.BACK else 0
        self._record(watched, IncidentKind.DIED, now, actions, cause, len(victims))
        for entry in victims:
            entry.replica = None
            self._interrupted(entry, now, actions)
        self._restart(watched, now, actions)

    def _restart_failed(self, watched: Watched, cause: str, now: float, actions: list[Action]) -> None:
        watched.failures += 1
        self._record(watched, IncidentKind.RESTART_FAILED, now, actions, cause)
        self._restart(watched, now, actions)

    def _restart(self, watched: Watched, now: float, actions: list[Action]) -> None:
        phase = watched.begin_restart(now, self.options, self._rng)
        if phase is Phase.RESTARTING:
            self._record(watched, IncidentKind.RESTARTING, now, actions)
            actions.append(Restart(watched.replica))
        elif phase in (Phase.GIVEN_UP, Phase.DEAD):
            self._record(watched, IncidentKind.GIVEN_UP, now, actions)

    def _tick(self, now: float, actions: list[Action]) -> None:
        for watched in self._replicas.values():
            if now < watched.wake:
                continue
            if watched.phase is Phase.SUSPECT:
                self._died(watched, f"no answer for {self.options.suspect_seconds:g} s", now, actions)
            elif watched.phase is Phase.RESTARTING:
                self._restart_failed(watched, "the restart took too long", now, actions)
            else:  # its back-off is over, or the circuit closes for one attempt
                watched.restart(now, self.options)
                self._record(watched, IncidentKind.RESTARTING, now, actions)
                actions.append(Restart(watched.replica))

    def _record(
        self,
        watched: Watched,
        kind: IncidentKind,
        now: float,
        actions: list[Action],
        cause: str = "",
        requests: int = 0,
    ) -> None:
        incident = Incident(now, watched.replica, kind, cause, requests)
        self.history.append(incident)
        actions.append(Record(incident))
