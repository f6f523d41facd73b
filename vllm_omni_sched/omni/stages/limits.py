"""How many requests each replica of a stage is given at once, and how much work it has left."""

from __future__ import annotations

import threading

from vllm_omni_sched.omni.stages.memory import HostMemory
from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.progressive import ProgressiveWindow
from vllm_omni_sched.resource.work_left import WorkLeft

SLOWDOWN = 2.0  # of a request in a batch, relative to one alone, that is aimed at where the target is out of reach
SMOOTHING = 0.1  # what the last lone request counts


class ReplicaLoad:
    """What a replica has in hand, by the rules of `WorkLeft`; vLLM-Omni asks from another thread, too.

    No batch meets a latency target below what one request takes alone. There the target is `SLOWDOWN` times that, as
    far as it is known; else the limit of a long stage would stay at its least, whatever that costs.
    """

    def __init__(
        self, limit: BatchControl, window: ProgressiveWindow | None = None, target_seconds: float = 0.0
    ) -> None:
        self.limit, self.window = limit, window
        self.target_seconds = target_seconds  # of latency, as the operator has chosen it
        self.alone_seconds = 0.0  # latency of requests that had the replica for themselves, smoothed
        self._alone: str | None = None  # the request that has had the replica for itself since it began
        self._work: WorkLeft[str] = WorkLeft()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._work)

    @property
    def speed(self) -> float:
        """Of its work, relative to what costs are estimated for."""
        return self._work.speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._work.speed = speed

    @property
    def since(self) -> float:
        """The latest time that it was told."""
        return self._work.since

    def begin(self, request_id: str, cost_seconds: float, now: float, units: int = 0) -> None:
        with self._lock:
            self._work.add(request_id, cost_seconds, now)
            self._alone = request_id if len(self._work) == 1 else None
        if self.window is not None:
            self.window.begin(request_id, units, now)

    def through(self, request_id: str, now: float, seconds: float) -> None:
        """A request is through with what the latency target is about; it took so long."""
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
        """As many are to come; a limit that is not steered stays."""
        if isinstance(self.limit, PidBatch):
            self.limit.raise_to(limit)

    def look_at(self, memory: HostMemory, now: float) -> None:
        """A limit that is steered falls where memory is short."""
        if isinstance(self.limit, PidBatch):
            self.limit.note_memory(memory.used(now))

    def end(self, request_id: str, now: float) -> float | None:
        """The seconds that it had; None for one that is not there."""
        if self.window is not None:
            self.window.drop(request_id)
        with self._lock:
            if request_id == self._alone:
                self._alone = None
            return self._work.take(request_id, now)

    def remaining_seconds(self, now: float) -> float:
        """At speed 1, of all that are there."""
        with self._lock:
            return self._work.remaining_seconds(now)

    def next_end_seconds(self, now: float) -> float:
        """Until the first of them should be done; ``inf`` where all have taken longer than they should."""
        with self._lock:
            return self._work.next_end_seconds(now)
