"""Keep the requests that wait for a stage up to date for its gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.graph.order import BATCH, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.path_order import PathRequest
from vllm_omni_sched.omni.stages.work import Work
from vllm_omni_sched.resource.balance import ReplicaState
from vllm_omni_sched.resource.gate_types import GateRequest, GateTerms
from vllm_omni_sched.resource.stage_gate import StageGate

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.policies import Policies

AS_THEY_CAME = WaitingOrder(max_wait_seconds=math.inf)


@dataclass(frozen=True)
class Sights:
    """Functions that return a work's units of long work, its warm replicas, and their distances."""

    units: Callable[[Work], int]
    warm: Callable[[Work], Mapping[int, float]]
    distances: Callable[[Work], Mapping[int, float]]


class Entrance(GateTerms):
    """The works that wait for one stage.

    1. A work that was prepared for a replica goes there, ahead of all others, as soon as the replica has room. If the
    replica is gone, the work goes with the others.
    2. The others go through the gate: by class and slack, or ``as_they_came``.
    3. A work is described when it begins to wait, by the estimated costs of its stages at that time. It is described
    again when it begins to wait again, and when the credits that it needs change.
    """

    def __init__(self, shared: Policies, stage_id: int, gate: StageGate, sights: Sights, as_they_came: bool) -> None:
        self._shared, self._stage_id, self._gate, self._sights = shared, stage_id, gate, sights
        self._as_they_came = as_they_came
        self._works: dict[str, Work] = {}
        self._bound: dict[str, GateRequest] = {}
        self._places: dict[str, int] = {}  # in order of arrival
        self._number = 0
        self._describe: Callable[[int], ReplicaState | None] | None = None  # while some replicas are drawn

    def put(self, pool: Any, work: Work, now: float) -> None:
        """Add a work that waits from now on."""
        self._works[work.request_id] = work
        self._places[work.request_id] = self._number
        self._number += 1
        request = self._described(work)
        if pool.get_bound_replica_id(work.request_id) is None:
            self._bound.pop(work.request_id, None)
            self._gate.put(request, now)
        else:
            self._gate.remove(work.request_id)
            self._bound[work.request_id] = request

    def remove(self, request_id: str) -> None:
        """Remove a work; unknown ones are ignored."""
        self._works.pop(request_id, None)
        self._places.pop(request_id, None)
        self._bound.pop(request_id, None)
        self._gate.remove(request_id)

    def credits_changed(self, request_id: str, now: float) -> None:
        """Describe a waiting request again after a change of the credits that it needs; unknown ones are ignored."""
        if request_id in self._gate:
            self._gate.put(self._described(self._works[request_id]), now)

    def release(
        self,
        pool: Any,
        replicas: list[ReplicaState],
        now: float,
        describe: Callable[[int], ReplicaState | None] | None = None,
    ) -> list[tuple[str, int]]:
        """Return the requests to start now with their replicas; they no longer wait.

        Args:
            pool: the stage's pool.
            replicas: the replicas that may get a request.
            now: in seconds.
            describe: returns another replica, if ``replicas`` were drawn from many. Then only one request goes, and
                others are drawn for the next one.
        """
        self._describe = describe
        found = self._prepared(pool, self._free(pool, replicas), now) if self._bound else []
        if not found:
            staying = [one for one in replicas if one.replica_id not in pool.draining]
            most = math.inf if describe is None else 1
            plan = self._gate.release(now, staying, self._shared.dice, self, most)
            found = [(one.request_id, one.replica_id) for one in plan.releases]
        self._describe = None
        for name, _ in found:
            del self._works[name], self._places[name]
        return found

    def _free(self, pool: Any, replicas: list[ReplicaState]) -> dict[int, int]:
        """Return the room of these replicas, and of those for which a work was prepared."""
        free = {one.replica_id: one.room for one in replicas}
        if self._describe is not None:
            for replica_id in {pool.get_bound_replica_id(name) for name in self._bound} - free.keys() - {None}:
                one = self._describe(replica_id)
                if one is not None:
                    free[replica_id] = one.room
        return free

    def _prepared(self, pool: Any, free: dict[int, int], now: float) -> list[tuple[str, int]]:
        found = []
        for name in sorted(self._bound, key=lambda name: self._gate.order.key(self._bound[name].waiting, now)):
            replica_id = pool.get_bound_replica_id(name)
            if replica_id not in free:
                self._gate.put(self._bound.pop(name), now)
            elif free[replica_id] > 0 and self.take(name):
                free[replica_id] -= 1
                del self._bound[name]
                found.append((name, replica_id))
        return found

    def _described(self, work: Work) -> GateRequest:
        known = work.known
        return GateRequest(
            self._waiting(work),
            low=known.low,
            units=self._sights.units(work),
            needs=(
                self._shared.credits_needed(self._stage_id, work.request_id),
                known.modality if self._shared.waits_for_memory(work.request_id) else None,
            ),
        )

    def _waiting(self, work: Work) -> WaitingRequest:
        known = work.known
        if self._as_they_came:
            return WaitingRequest(work.request_id, self._places[work.request_id], BATCH, work.cost_seconds)
        request = PathRequest(
            work.request_id,
            known.arrival,
            known.costs,
            known.sla,
            known.modality,
            known.priority,
            ready=work.arrived,
            affinity=known.keys,
        )
        return self._shared.order.at_stage(request, self._stage_id)

    # ---- what the gate asks

    def has_credits(self, needs: Hashable) -> bool:
        credits = self._shared.credits
        assert isinstance(needs, tuple)  # as described
        return credits is None or all(credits.free(stage) > 0 for stage in needs[0])

    def take(self, request_id: str) -> bool:
        return self._shared.has_memory(request_id) and self._shared.take_credits(self._stage_id, request_id)

    def warm(self, request_id: str) -> Mapping[int, float]:
        return self._sights.warm(self._works[request_id])

    def distances(self, request_id: str) -> Mapping[int, float]:
        return self._sights.distances(self._works[request_id])

    def replica(self, replica_id: int) -> ReplicaState | None:
        return self._describe(replica_id) if self._describe is not None else None
