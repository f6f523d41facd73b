"""Keep the requests that wait for a stage, as seen by its gate."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from vllm_omni_sched.resource.balance import CHOICES, ReplicaState
from vllm_omni_sched.resource.gate_types import GatePlan, GateRequest, GateTerms
from vllm_omni_sched.resource.stage_gate import StageGate
from vllm_omni_sched.sim.pools.policies import Policies
from vllm_omni_sched.sim.pools.trip import Trip


class Entrance(GateTerms):
    """The requests that wait for one stage; rules as in `omni.stages.entrance`.

    A request is described when it begins to wait. While it waits its credits do not change: a stage gives back
    the credits of a request before the next one gets it.

    Args:
        units: returns the units of long work of a request; 0 for short work.
    """

    def __init__(self, shared: Policies, stage: int, gate: StageGate, units: Callable[[Trip], int]) -> None:
        self.waiting: dict[str, Trip] = {}
        self._shared, self._stage, self._gate, self._units = shared, stage, gate, units
        self._describe: Callable[[int], ReplicaState | None] | None = None  # while some replicas are drawn

    def put(self, trip: Trip, now: float) -> None:
        """Add a request that waits from now on."""
        shared = self._shared
        self.waiting[trip.name] = trip
        request = GateRequest(
            shared.queued(trip, self._stage, now),
            low=shared.is_low(trip),
            units=self._units(trip),
            needs=self._needed(trip),
        )
        self._gate.put(request, now)

    def remove(self, name: str) -> None:
        """Remove a request; unknown ones are ignored."""
        if self.waiting.pop(name, None) is not None:
            self._gate.remove(name)

    def release(
        self,
        now: float,
        replicas: Sequence[ReplicaState],
        describe: Callable[[int], ReplicaState | None] | None = None,
    ) -> tuple[GatePlan, list[tuple[Trip, int]]]:
        """Return the gate's plan, and the requests to start with their replicas; they no longer wait.

        Args:
            now: in seconds.
            replicas: the replicas that may get a request.
            describe: returns another replica, if ``replicas`` were drawn from many. Then only one request goes, and
                others are drawn for the next one.
        """
        self._describe = describe
        most = math.inf if describe is None else 1
        plan = self._gate.release(now, replicas, self._shared.dice, self, most)
        return plan, [(self.waiting.pop(one.request_id), one.replica_id) for one in plan.releases]

    def _needed(self, trip: Trip) -> tuple[str, ...]:
        credits = self._shared.credits
        return () if credits is None else credits.needed(str(self._stage), trip.name, path=_path(trip))

    # ---- what the gate asks

    def has_credits(self, needs: Hashable) -> bool:
        credits = self._shared.credits
        assert isinstance(needs, tuple)  # as described
        return credits is None or all(credits.free(stage) > 0 for stage in needs)

    def take(self, request_id: str) -> bool:
        credits = self._shared.credits
        if credits is None:
            return True
        return credits.take(str(self._stage), request_id, path=_path(self.waiting[request_id]))

    def warm(self, request_id: str) -> Mapping[int, float]:
        book, keys = self._shared.affinity[self._stage], self.waiting[request_id].keys
        if book is None or not keys:
            return {}
        return book.warm(keys, book.holders(keys, None if self._describe is None else CHOICES))

    def replica(self, replica_id: int) -> ReplicaState | None:
        return self._describe(replica_id) if self._describe is not None else None


def _path(trip: Trip) -> list[str]:
    """Return the rest of the path: a request that shared work before has never entered the earlier stages."""
    return [str(stage) for stage in trip.path[trip.position :]]
