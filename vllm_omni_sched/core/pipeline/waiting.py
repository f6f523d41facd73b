"""Keep the requests that wait for a stage up to date for its gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.graph.order import BATCH, WaitingRequest
from vllm_omni_sched.graph.path_order import PathRequest
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_gate import GateRequest, GateTerms, Release, StageGate


@dataclass(frozen=True)
class StageView:
    """Functions that return the units of long work of a request, its warm replicas, what these save, and distances."""

    units: Callable[[StageWork], int]
    warm: Callable[[StageWork], Mapping[int, float]]
    saved_seconds: Callable[[StageWork], Mapping[int, float] | None]
    distances: Callable[[StageWork], Mapping[int, float]]


class WaitingRequests(GateTerms):
    """The requests that wait for one stage.

    1. A request that was prepared for a replica goes there, ahead of all others, as soon as the replica has room. If
       the replica is gone, the request goes with the others.
    2. The others go through the gate: by class and slack, or as they came.
    3. A request is described when it begins to wait, by the estimated costs of its stages at that time. It is described
       again when it begins to wait again, and when the credits that it needs change.
    """

    def __init__(self, context: PipelineContext, stage_id: int, gate: StageGate, view: StageView) -> None:
        self.gate = gate
        self._context, self._stage_id, self._view = context, stage_id, view
        self._works: dict[str, StageWork] = {}
        self._bound: dict[str, GateRequest] = {}
        self._places: dict[str, int] = {}  # in order of arrival
        self._number = 0
        self._describe: Callable[[int], ReplicaState | None] | None = None  # while some replicas are drawn

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._works

    @property
    def bound(self) -> bool:
        """Return whether any waiting request was prepared for a replica."""
        return bool(self._bound)

    def put(self, work: StageWork, now: float) -> None:
        """Add a request that waits from now on."""
        name = work.request_id
        self._works[name] = work
        self._places[name] = self._number
        self._number += 1
        request = self._described(work)
        if work.bound is None:
            self._bound.pop(name, None)
            self.gate.put(request, now)
        else:
            self.gate.remove(name)
            self._bound[name] = request

    def remove(self, request_id: str) -> None:
        """Remove a request; unknown ones are ignored."""
        if self._works.pop(request_id, None) is not None:
            del self._places[request_id]
            self._bound.pop(request_id, None)
            self.gate.remove(request_id)

    def credits_changed(self, request_id: str, now: float) -> None:
        """Describe a request again after a change of the credits that it needs; unknown ones are ignored."""
        if request_id in self.gate:
            self.gate.put(self._described(self._works[request_id]), now)

    def release(
        self,
        now: float,
        replicas: list[ReplicaState],
        describe: Callable[[int], ReplicaState | None] | None = None,
        prepared: Callable[[int], ReplicaState | None] = lambda _: None,
    ) -> tuple[tuple[Release, ...] | list[tuple[str, int]], float | None]:
        """Return the requests to start now with their replicas, and when to ask again; they no longer wait.

        Args:
            now: in seconds.
            replicas: the replicas that may get a request.
            describe: returns another replica, if ``replicas`` were drawn from many. Then only one request goes, and
                others are drawn for the next one.
            prepared: returns a replica for which requests were prepared; None if it gets none.
        """
        if self._bound and (found := self._prepared(prepared, now)):
            for name, _ in found:
                del self._works[name], self._places[name]
            return found, None
        if not replicas:
            return [], None
        self._describe = describe
        plan = self.gate.release(now, replicas, self._context.rng, self, math.inf if describe is None else 1)
        self._describe = None
        for one in plan.releases:
            del self._works[one.request_id], self._places[one.request_id]
        return plan.releases, plan.wake_at

    def _prepared(self, describe: Callable[[int], ReplicaState | None], now: float) -> list[tuple[str, int]]:
        found = []
        free: dict[int, int | None] = {}
        for name in sorted(self._bound, key=lambda name: self.gate.order.key(self._bound[name].waiting, now)):
            replica_id = self._works[name].bound
            assert replica_id is not None
            if replica_id not in free:
                one = describe(replica_id)
                free[replica_id] = None if one is None else one.room
            room = free[replica_id]
            if room is None:
                self.gate.put(self._bound.pop(name), now)
            elif room > 0 and self.take(name):
                free[replica_id] = room - 1
                del self._bound[name]
                found.append((name, replica_id))
        return found

    def _described(self, work: StageWork) -> GateRequest:
        context, known = self._context, work.known
        return GateRequest(
            self._waiting(work),
            low=known.low,
            units=self._view.units(work),
            needs=context.credits_needed(self._stage_id, known),
        )

    def _waiting(self, work: StageWork) -> WaitingRequest:
        known, context = work.known, self._context
        if not context.by_class:
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
        return context.order.at_stage(request, self._stage_id)

    # ---- what the gate asks

    def has_credits(self, needs: Hashable) -> bool:
        credits = self._context.credits
        assert isinstance(needs, tuple)  # as described
        return credits is None or all(credits.free(stage) > 0 for stage in needs)

    def take(self, request_id: str) -> bool:
        return self._context.take_credits(self._stage_id, self._works[request_id].known)

    def warm(self, request_id: str) -> Mapping[int, float]:
        return self._view.warm(self._works[request_id])

    def saved_seconds(self, request_id: str) -> Mapping[int, float] | None:
        return self._view.saved_seconds(self._works[request_id])

    def distances(self, request_id: str) -> Mapping[int, float]:
        return self._view.distances(self._works[request_id])

    def replica(self, replica_id: int) -> ReplicaState | None:
        return self._describe(replica_id) if self._describe is not None else None
