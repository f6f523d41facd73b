"""Decide where the requests of a dead replica go, and which of their stages run again."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from vllm_omni_sched.monitor.recovery.events import (
    Action,
    Deliver,
    Dispatched,
    Drop,
    Fail,
    FailReason,
    Finished,
    Redispatch,
    Replica,
    Wait,
)
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions
from vllm_omni_sched.monitor.recovery.state import LIVE, SERVING, Entry, Ledger, Phase, ReplicaState


@dataclass(frozen=True)
class Rerun:
    """Stages to run again. ``stages``: each after those it needs. ``resume``: those of them that can start at once."""

    stages: tuple[int, ...]
    resume: tuple[int, ...]


def plan_rerun(stage: int, sources: Mapping[int, Sequence[int]], held: Collection[int]) -> Rerun:
    """Return the stages to run so that ``stage`` gets done.

    A finished stage is not run again while its output is in ``held``; if it is not held, its own sources are checked,
    and so on to the nearest held outputs, or to the entry. ``sources``: the stages that each stage reads, a DAG.
    """
    needs: dict[int, list[int]] = {}
    pending = [stage]
    while pending:
        one = pending.pop()
        if one not in needs:
            needs[one] = [source for source in sources.get(one, ()) if source not in held]
            pending += needs[one]
    resume = sorted(one for one, missing in needs.items() if not missing)
    return Rerun(tuple(TopologicalSorter(needs).static_order()), tuple(resume))


class Placement:
    """Rules 2 to 5 of `Recovery`: what happens to requests.

    Args:
        replicas: present state of the replicas; `Replicas` changes it.
        sources: the stages that each stage reads.
    """

    def __init__(
        self,
        replicas: Mapping[Replica, ReplicaState],
        sources: Mapping[int, Sequence[int]],
        options: RecoveryOptions,
    ) -> None:
        self.ledger = Ledger()
        self._replicas, self._sources, self._options = replicas, sources, options

    def dispatched(self, event: Dispatched, now: float, actions: list[Action]) -> None:
        request_id, replica = event.request_id, event.replica
        if replica not in self._replicas:
            raise ValueError(f"request {request_id!r} was dispatched to {replica}, which does not exist")
        entry = self.ledger.enter(request_id, replica.stage, event.whole or request_id)
        if entry.replica is not None or request_id in self.ledger.waiting:
            raise ValueError(f"request {request_id!r} was dispatched to {replica} while it is in flight")
        entry.stage, entry.stages = replica.stage, (replica.stage,)
        watched = self._replicas[replica]
        if watched.phase in SERVING:
            self._give(entry, watched)
        else:  # the replica died while the request was on its way
            self.ledger.wait(entry, now + self._options.max_wait_seconds)

    def finished(self, event: Finished, actions: list[Action]) -> None:
        entry = self.ledger.entries.get(event.request_id)
        if entry is None or entry.replica is None or entry.attempt != event.attempt:
            actions.append(Drop(event.request_id))
            return
        watched = self._replicas[entry.replica]
        if watched.phase is Phase.BACK:
            watched.phase = Phase.HEALTHY
        watched.requests.pop(event.request_id)
        entry.replica, entry.deaths = None, 0
        entry.held.add(entry.stage)
        if event.final:
            self.ledger.leave(event.request_id)
        actions.append(Deliver(event.request_id))

    def leave(self, request_id: str) -> None:
        entry = self.ledger.leave(request_id)
        if entry is not None and entry.replica is not None:
            self._replicas[entry.replica].requests.pop(request_id)

    def unsent(self, request_id: str) -> None:
        """Take a request off a replica that it was never sent to; this counts as no death."""
        entry = self.ledger.entries.get(request_id)
        if entry is not None and entry.replica is not None:
            self._replicas[entry.replica].requests.pop(request_id)
            entry.replica = None

    def output_lost(self, request_id: str, stage: int) -> None:
        """Record that the output of a finished stage for a request is no longer held."""
        if request_id in self.ledger.entries:
            self.ledger.entries[request_id].held.discard(stage)

    def interrupted(self, request_ids: Iterable[str], now: float, actions: list[Action]) -> None:
        """Let requests wait whose replica died, at least until the end of this event, or fail them."""
        for entry in [self.ledger.entries[request_id] for request_id in request_ids]:
            entry.replica = None
            entry.deaths += 1
            if entry.deaths >= self._options.poison_deaths:
                self._fail(entry, FailReason.POISON, actions)
            elif self.ledger.redispatches[entry.whole] >= self._options.max_redispatches:
                self._fail(entry, FailReason.REDISPATCHES, actions)
            else:
                self.ledger.wait(entry, now + self._options.max_wait_seconds)

    def recalled(self, request_id: str, now: float, actions: list[Action]) -> None:
        """Take a request off its replica, as if that had died, because the sender of its input is gone."""
        entry = self.ledger.entries.get(request_id)
        if entry is None or request_id in self.ledger.waiting:
            return
        if entry.replica is not None:
            self._replicas[entry.replica].requests.pop(request_id)
        self.interrupted((request_id,), now, actions)

    def place_waiting(self, now: float, actions: list[Action]) -> None:
        """Dispatch all waiting requests that have a place; return `Wait` once for each of the others, or fail it."""
        for entry in tuple(self.ledger.waiting.values()):
            # Planned anew each time: an output may have been lost meanwhile.
            stages = plan_rerun(entry.stage, self._sources, entry.held).stages
            target = self._place(entry, stages[0])
            if target is not None:
                self.ledger.stop_waiting(entry)
                entry.stages, entry.stage = stages, stages[0]
                self.ledger.redispatches[entry.whole] += 1
                self._give(entry, target)
                actions.append(Redispatch(entry.request_id, target.replica, entry.attempt, stages))
            elif now >= entry.until:
                self._fail(entry, FailReason.WAITED, actions)
            elif not self.coming(stages[0]):
                self._fail(entry, FailReason.NO_REPLICA, actions)
            elif not entry.wait_reported:
                entry.wait_reported = True
                actions.append(Wait(entry.request_id, entry.until))

    def coming(self, stage: int) -> bool:
        """Return whether a replica of the stage serves or may serve again soon."""
        gone = (Phase.DEAD, Phase.GIVEN_UP)
        return any(one.replica.stage == stage and one.phase not in gone for one in self._replicas.values())

    def _place(self, entry: Entry, stage: int) -> ReplicaState | None:
        free = [
            one
            for one in self._replicas.values()
            if one.replica.stage == stage and one.phase in LIVE and len(one.requests) < one.limit
        ]
        if self._last_chance(entry):
            most = self._options.last_chance_together
            free = [one for one in free if self._condemned(one) < most]
        return min(free, key=lambda one: (len(one.requests), one.replica), default=None)

    def _last_chance(self, entry: Entry) -> bool:
        return 0 < entry.deaths == self._options.poison_deaths - 1

    def _condemned(self, watched: ReplicaState) -> int:
        return sum(self._last_chance(self.ledger.entries[request_id]) for request_id in watched.requests)

    def _give(self, entry: Entry, watched: ReplicaState) -> None:
        entry.replica = watched.replica
        entry.attempt += 1
        watched.requests[entry.request_id] = None

    def _fail(self, entry: Entry, reason: FailReason, actions: list[Action]) -> None:
        self.leave(entry.request_id)
        actions.append(Fail(entry.request_id, reason))
