"""Limit the requests of each replica of a stage, and track its remaining work."""

from __future__ import annotations

import threading

from vllm_omni_sched.omni.stages.memory import HostMemory
from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.progressive import ProgressiveWindow
from vllm_omni_sched.resource.work_left import WorkLeft

SLOWDOWN = 2.0  # target for a batch relative to a lone request, if the configured target cannot be reached
SMOOTHING = 0.1  # weight of the last lone request


class ReplicaLoad:
    """The requests of a replica by the rules of `WorkLeft`; thread-safe, since vLLM-Omni reads it from other threads.

    No batch meets a latency target below the time of a lone request. In that case the target is `SLOWDOWN` times that
    time, once it is known; otherwise the limit of a long stage would stay at its minimum at any cost.
    """

    def __init__(
        self, limit: BatchControl, window: ProgressiveWindow | None = None, target_seconds: float = 0.0
    ) -> None:
        self.limit, self.window = limit, window
        self.target_seconds = target_seconds  # latency target of the operator
        self.alone_seconds = 0.0  # smoothed latency of requests that ran alone
        self._alone: str | None = None  # the request that has run alone since it began
        self._work: WorkLeft[str] = WorkLeft()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._work)

    @property
    def speed(self) -> float:
        """Return the speed relative to the device that costs are estimated for."""
        return self._work.speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._work.speed = speed

    @property
    def since(self) -> float:
        """Return the latest time that was passed in."""
        return self._work.since

    def begin(self, request_id: str, cost_seconds: float, now: float, units: int = 0) -> None:
        with self._lock:
            self._work.add(request_id, cost_seconds, now)
            self._alone = request_id if len(self._work) == 1 else None
        if self.window is not None:
            self.window.begin(request_id, units, now)

    def through(self, request_id: str, now: float, seconds: float) -> None:
        """Record the latency of a request once it has reached what the latency target measures."""
        if request_id == self._alone:
            self.alone_seconds += (SMOOTHING if self.alone_seconds else 1.0) * (seconds - self.alone_seconds)
        self._aim(max(self.target_seconds, SLOWDOWN * self.alone_seconds))
        self.limit.observe(seconds, now, len(self))
        if self.window is not None:
            self.window.through(request_id, now)

    def _aim(self, target_seconds: float) -> None:
        if isinstance(self.limit, PidBatch):
            self.limit.target_seconds = target_seconds
        if self.window is not None:
            self.window.target_seconds = target_seconds

    def raise_limit(self, limit: int) -> None:
        """Raise a controlled limit for a load that is to come; a fixed limit stays."""
        if isinstance(self.limit, PidBatch):
            self.limit.raise_to(limit)

    def look_at(self, memory: HostMemory, now: float) -> None:
        """Lower a controlled limit if memory is short."""
        if isinstance(self.limit, PidBatch):
            self.limit.note_memory(memory.used(now))

    def end(self, request_id: str, now: float) -> float | None:
        """Remove a request, and return the seconds that it had; None for an unknown one."""
        if self.window is not None:
            self.window.drop(request_id)
        with self._lock:
            if request_id == self._alone:
                self._alone = None
            return self._work.take(request_id, now)

    def remaining_seconds(self, now: float) -> float:
        """Return the remaining seconds of all running requests, at speed 1."""
        with self._lock:
            return self._work.remaining_seconds(now)

    def next_end_seconds(self, now: float) -> float:
        """Return the seconds until the next request should finish; ``inf`` if all have exceeded their estimates."""
        with self._lock:
            return self._work.next_end_seconds(now)
