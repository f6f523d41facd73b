"""How many requests each replica of a stage is given at once, and how much work it has left."""

from __future__ import annotations

import threading

from vllm_omni_sched.omni.stages.memory import HostMemory
from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.progressive import ProgressiveWindow
from vllm_omni_sched.resource.work_left import WorkLeft


class ReplicaLoad:
    """What a replica has in hand, by the rules of `WorkLeft`; vLLM-Omni asks from another thread, too."""

    def __init__(self, limit: BatchControl, window: ProgressiveWindow | None = None) -> None:
        self.limit, self.window = limit, window
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
        if self.window is not None:
            self.window.begin(request_id, units, now)

    def through(self, request_id: str, now: float, seconds: float) -> None:
        """A request is through with what the latency target is about; it took so long."""
        self.limit.observe(seconds, now, len(self))
        if self.window is not None:
            self.window.through(request_id, now)

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
            return self._work.take(request_id, now)

    def remaining_seconds(self, now: float) -> float:
        """At speed 1, of all that are there."""
        with self._lock:
            return self._work.remaining_seconds(now)

    def next_end_seconds(self, now: float) -> float:
        """Until the first of them should be done; ``inf`` where all have taken longer than they should."""
        with self._lock:
            return self._work.next_end_seconds(now)
