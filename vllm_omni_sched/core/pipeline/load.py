"""Limit the requests of a replica, and track its remaining work."""

from __future__ import annotations

from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.pipeline.stage_limits import ProgressiveWindow
from vllm_omni_sched.resource.pipeline.work_left import WorkLeft


class ReplicaLoad:
    """The requests of a replica by the rules of `WorkLeft`, with its limits.

    1. It has room for ``max_num_seqs`` requests, as many as its engine runs at once.
    2. A controller limits only the requests that its latency is of: those that have not yet reached what it measures
       (`through`). Requests that decode delay no prefill to speak of, and holding them back would cost throughput.
    3. While the memory of the host is short, a controlled limit falls.
    """

    __slots__ = ("_measured", "control", "max_num_seqs", "window", "work")

    def __init__(
        self, max_num_seqs: int, control: PidBatch | None = None, window: ProgressiveWindow | None = None
    ) -> None:
        self.max_num_seqs, self.control, self.window = max_num_seqs, control, window
        self.work: WorkLeft[str] = WorkLeft()
        self._measured: set[str] = set()  # requests whose latency is still being measured

    def __len__(self) -> int:
        return len(self.work)

    def limit(self, ahead: int = 0) -> int:
        """Return how many requests it may have now. ``ahead``: how many may wait in its engine."""
        limit = self.max_num_seqs + ahead
        if self.control is None:
            return limit
        return min(limit, len(self.work) - len(self._measured) + self.control.limit)

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
        if self.control is not None:
            self._measured.add(request_id)
        if self.window is not None:
            self.window.begin(request_id, units, now)

    def through(self, request_id: str, now: float, seconds: float, memory_used: float = 0.0) -> None:
        """Record the latency of a request once it has reached what the latency target measures.

        Args:
            memory_used: fraction of the host's memory that is in use.
        """
        if self.control is not None:
            self.control.note_memory(memory_used)
            self.control.observe(seconds, now, len(self._measured))
            self._measured.discard(request_id)
        if self.window is not None:
            self.window.through(request_id, now)

    def end(self, request_id: str, now: float) -> float | None:
        """Remove a request, and return the seconds that it had; None for an unknown one."""
        self._measured.discard(request_id)
        if self.window is not None:
            self.window.drop(request_id)
        return self.work.take(request_id, now)

    def remaining_seconds(self, now: float) -> float:
        """Return the remaining seconds of all running requests, at speed 1."""
        return self.work.remaining_seconds(now)

    def next_end_seconds(self, now: float) -> float:
        """Return the seconds until the next request should finish; ``inf`` if all have exceeded their estimates."""
        return self.work.next_end_seconds(now)
