"""Limit the requests of a replica, and track its remaining work."""

from __future__ import annotations

from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.pipeline.stage_limits import ProgressiveWindow
from vllm_omni_sched.resource.pipeline.work_left import WorkLeft

SLOWDOWN = 2.0  # target for a batch relative to a lone request, if the configured target cannot be reached
SMOOTHING = 0.1  # weight of the last lone request


class ReplicaLoad:
    """The requests of a replica by the rules of `WorkLeft`, with its limits.

    1. The batch limit and the window of long work follow the latency of requests.
    2. No batch meets a latency target below the time of a lone request. In that case the target is `SLOWDOWN` times
       that time, once it is known; otherwise the limit of a long stage would stay at its minimum at any cost.
    3. While the memory of the host is short, a controlled limit falls.

    Args:
        target_seconds: latency target of the operator.
    """

    __slots__ = ("_alone", "_controlled", "alone_seconds", "limit", "target_seconds", "window", "work")

    def __init__(
        self, limit: BatchControl, window: ProgressiveWindow | None = None, target_seconds: float = 0.0
    ) -> None:
        self.limit, self.window = limit, window
        self.target_seconds = target_seconds
        self.alone_seconds = 0.0  # smoothed latency of requests that ran alone
        self.work: WorkLeft[str] = WorkLeft()
        self._controlled = limit if isinstance(limit, PidBatch) else None
        self._alone: str | None = None  # the request that has run alone since it began

    def __len__(self) -> int:
        return len(self.work)

    @property
    def speed(self) -> float:
        """Return the speed relative to the device that costs are estimated for."""
        return self.work.speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self.work.speed = speed

    def begin(self, request_id: str, cost_seconds: float, now: float, units: int = 0) -> None:
        """Add a request that was given to the replica. ``units``: its length, for the window of long work."""
        self.work.add(request_id, cost_seconds, now)
        self._alone = request_id if len(self.work) == 1 else None
        if self.window is not None:
            self.window.begin(request_id, units, now)

    def through(self, request_id: str, now: float, seconds: float, memory_used: float = 0.0) -> None:
        """Record the latency of a request once it has reached what the latency target measures.

        Args:
            memory_used: fraction of the host's memory that is in use.
        """
        if request_id == self._alone:
            self.alone_seconds += (SMOOTHING if self.alone_seconds else 1.0) * (seconds - self.alone_seconds)
        target_seconds = max(self.target_seconds, SLOWDOWN * self.alone_seconds)
        if self._controlled is not None:
            self._controlled.note_memory(memory_used)
            self._controlled.target_seconds = target_seconds
        self.limit.observe(seconds, now, len(self))
        if self.window is not None:
            self.window.target_seconds = target_seconds
            self.window.through(request_id, now)

    def raise_limit(self, limit: int) -> None:
        """Raise a controlled limit for a load that is to come; a fixed limit stays."""
        if self._controlled is not None:
            self._controlled.raise_to(limit)

    def end(self, request_id: str, now: float) -> float | None:
        """Remove a request, and return the seconds that it had; None for an unknown one."""
        if self.window is not None:
            self.window.drop(request_id)
        if request_id == self._alone:
            self._alone = None
        return self.work.take(request_id, now)

    def remaining_seconds(self, now: float) -> float:
        """Return the remaining seconds of all running requests, at speed 1."""
        return self.work.remaining_seconds(now)

    def next_end_seconds(self, now: float) -> float:
        """Return the seconds until the next request should finish; ``inf`` if all have exceeded their estimates."""
        return self.work.next_end_seconds(now)
