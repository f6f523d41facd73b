"""How much work a replica has left, and how much at once it is given."""

from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.progressive import ProgressiveWindow
from vllm_omni_sched.resource.work_left import WorkLeft
from vllm_omni_sched.sim.pools.trip import Leg


class Load(WorkLeft[Leg]):
    """The work that a replica has in hand; rules as in `WorkLeft`."""

    __slots__ = ("limit", "window")

    def __init__(self, limit: BatchControl | None = None, window: ProgressiveWindow | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.window = window

    def begin(self, leg: Leg, now: float, units: int = 0) -> None:
        """A request is given to the replica."""
        self.add(leg, leg.cost_seconds, now)
        if self.window is not None:
            self.window.begin(leg.name, units, now)

    def through(self, leg: Leg, now: float, seconds: float) -> None:
        """A request is through with what the latency target is about; it took so long."""
        if self.limit is not None:
            self.limit.observe(seconds, now, max(len(self), 1))
        if self.window is not None:
            self.window.through(leg.name, now)

    def end(self, leg: Leg, now: float) -> float | None:
        """The seconds that it had; None for one that is not there."""
        if self.window is not None:
            self.window.drop(leg.name)
        return self.take(leg, now)
