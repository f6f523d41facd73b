"""Track the remaining work of a replica, and its limits."""

from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.progressive import ProgressiveWindow
from vllm_omni_sched.resource.work_left import WorkLeft
from vllm_omni_sched.sim.pools.trip import Leg


class Load(WorkLeft[Leg]):
    """The work in flight on a replica; rules as in `WorkLeft`."""

    __slots__ = ("limit", "window")

    def __init__(self, limit: BatchControl | None = None, window: ProgressiveWindow | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.window = window

    def begin(self, leg: Leg, now: float, units: int = 0) -> None:
        """Add a request that was given to the replica."""
        self.add(leg, leg.cost_seconds, now)
        if self.window is not None:
            self.window.begin(leg.name, units, now)

    def through(self, leg: Leg, now: float, seconds: float) -> None:
        """Record the latency of a request once it has reached what the latency target measures."""
        if self.limit is not None:
            self.limit.observe(seconds, now, max(len(self), 1))
        if self.window is not None:
            self.window.through(leg.name, now)

    def end(self, leg: Leg, now: float) -> float | None:
        """Remove a request, and return the seconds that it had; None for an unknown one."""
        if self.window is not None:
            self.window.drop(leg.name)
        return self.take(leg, now)
