"""How many requests each replica of a stage is given at once, and how much work it has left."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from vllm_omni_sched.omni.stages.memory import HostMemory
from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.progressive import ProgressiveWindow

SLOWDOWN = 2.0  # of a request in a batch, relative to one alone, that is aimed at where the target is out of reach
SMOOTHING = 0.1  # what the last lone request counts


@dataclass
class ReplicaLoad:
    """What a replica has in hand.

    Requests that run together slow each other down; what one costs is therefore its share of the time: the seconds
    that passed divided by how many ran (processor sharing).

    No batch meets a latency target below what one request takes alone. There the target is `SLOWDOWN` times that, as
    far as it is known; else the limit of a long stage would stay at its least, whatever that costs.
    """

    limit: BatchControl
    window: ProgressiveWindow | None = None
    speed: float = 1.0  # of its work, relative to what costs are estimated for
    served: float = 0.0  # seconds that each request in it has had
    since: float = 0.0
    began: dict[str, float] = field(default_factory=dict)  # request -> `served` when it came
    costs: dict[str, float] = field(default_factory=dict)
    target_seconds: float = 0.0  # of latency, as the operator has chosen it
    alone_seconds: float = 0.0  # latency of requests that had the replica for themselves, smoothed
    _accompanied: set[str] = field(default_factory=set)

    def begin(self, request_id: str, cost_seconds: float, now: float, units: int = 0) -> None:
        self._pass(now)
        self.began[request_id], self.costs[request_id] = self.served, cost_seconds
        if len(self.began) > 1:
            self._accompanied.update(self.began)
        if self.window is not None:
            self.window.begin(request_id, units, now)

    def through(self, request_id: str, now: float, seconds: float) -> None:
        """A request is through with what the latency target is about; it took so long."""
        if request_id not in self._accompanied:
            self.alone_seconds += (SMOOTHING if self.alone_seconds else 1.0) * (seconds - self.alone_seconds)
        self._aim(max(self.target_seconds, SLOWDOWN * self.alone_seconds))
        self.limit.observe(seconds, now, len(self.began))
        if self.window is not None:
            self.window.through(request_id, now)

    def _aim(self, target_seconds: float) -> None:
        if isinstance(self.limit, PidBatch):
            self.limit.target_seconds = target_seconds
        if self.window is not None:
            self.window.target_seconds = target_seconds

    def raise_limit(self, limit: int) -> None:
        """As many are to come; a limit that is not steered stays."""
        if isinstance(self.limit, PidBatch):
            self.limit.raise_to(limit)

    def look_at(self, memory: HostMemory, now: float) -> None:
        """A limit that is steered falls where memory is short."""
        if isinstance(self.limit, PidBatch):
            self.limit.note_memory(memory.used(now))

    def end(self, request_id: str, now: float) -> float | None:
        """The seconds that it had; None for one that is not there."""
        self._pass(now)
        if self.window is not None:
            self.window.drop(request_id)
        self.costs.pop(request_id, None)
        self._accompanied.discard(request_id)
        began = self.began.pop(request_id, None)
        return None if began is None else self.served - began

    def remaining_seconds(self, now: float) -> float:
        """At speed 1, of all that are there, as far as costs are known."""
        return sum(max(left, 0.1 * cost) for left, cost in self._left(now))  # what took longer is nearly done

    def next_end_seconds(self, now: float) -> float:
        """Until the first of them should be done; ``inf`` where all have taken longer than they should."""
        soonest = min((left for left, _ in self._left(now) if left > 0), default=math.inf)
        return soonest * len(self.began) / self.speed

    def _left(self, now: float) -> list[tuple[float, float]]:
        """What is left of each by estimate, and the estimate, at speed 1."""
        self._pass(now)
        costs = list(self.costs.items())  # of what has just left there is nothing left
        return [(cost - self.speed * (self.served - self.began.get(name, -math.inf)), cost) for name, cost in costs]

    def _pass(self, now: float) -> None:
        if self.began and now > self.since:
            self.served += (now - self.since) / len(self.began)
        self.since = now
