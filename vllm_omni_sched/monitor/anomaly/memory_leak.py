"""Detect memory that grows independently of the load."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.anomaly.statistics import Series


@dataclass(slots=True)
class _Memory:
    capacity_bytes: float
    blocks: deque[tuple[float, float, float]]  # mean time, bytes, requests in flight
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    found: Anomaly | None = None


class MemoryLeak:
    """Finds a process or device whose memory grows independently of its load.

    1. Samples are averaged in blocks of ``block_samples``; the last ``window`` blocks count.
    2. The part explained by the load is removed: a regression on the requests in flight and on their maximum so far
       (an allocator keeps what it once took), fitted jointly with time. Where time explains the load (a ramp, R² above
       0.8), the two cannot be told apart, and nothing is reported.
    3. The rest must rise from each of ``parts`` equal parts of the window to the next, and at least a third of its
       rise must be in the second half: a warm-up that levels off is not a leak.
    4. At that rate, it must fill the rest of the memory within ``horizon_seconds``.

    Tested once per block.
    """

    window = 64
    parts = 8
    block_samples = 8

    def __init__(self, horizon_seconds: float = 86400.0) -> None:
        self.horizon_seconds = horizon_seconds
        self._memory: dict[str, _Memory] = {}

    def observe(self, subject: str, now: float, used_bytes: float, capacity_bytes: float, in_flight: float) -> None:
        """Record how much of its memory the subject uses now, and its requests in flight."""
        memory = self._memory.setdefault(subject, _Memory(capacity_bytes, deque(maxlen=self.window)))
        memory.capacity_bytes = capacity_bytes
        memory.samples.append((now, used_bytes, in_flight))
        if len(memory.samples) == self.block_samples:
            time, used, load = np.mean(memory.samples, axis=0)
            memory.samples.clear()
            if memory.blocks and time <= memory.blocks[-1][0]:
                memory.blocks.clear()  # the clock was set back
            memory.blocks.append((float(time), float(used), float(load)))
            memory.found = self._test(subject, memory)

    def forget(self, subject: str) -> None:
        """Forget a subject that was restarted, as its old memory use no longer counts."""
        self._memory.pop(subject, None)

    def check(self, now: float) -> tuple[Anomaly, ...]:
        """Return all leaks, as of the last block of each subject."""
        return tuple(memory.found for memory in self._memory.values() if memory.found)

    def _test(self, subject: str, memory: _Memory) -> Anomaly | None:
        if len(memory.blocks) < self.window:
            return None
        times, used, load = np.array(memory.blocks, dtype=np.float64).T
        rest = without_load(times, used, load)
        if rest is None:
            return None
        levels, at = rest.reshape(self.parts, -1).mean(axis=1), times.reshape(self.parts, -1).mean(axis=1)
        rise, late = float(levels[-1] - levels[0]), float(levels[-1] - levels[self.parts // 2])
        if not (np.diff(levels) > 0).all() or late < rise / 3:
            return None
        slope = rise / float(at[-1] - at[0])
        full_in = max(memory.capacity_bytes - float(used[-1]), 0.0) / slope
        if full_in > self.horizon_seconds:
            return None
        evidence = {"bytes_per_second": slope, "full_in_seconds": full_in}
        since = memory.found.since if memory.found else float(times[0])
        return Anomaly(AnomalyKind.MEMORY_LEAK, subject, since, evidence)


def without_load(times: Series, used: Series, load: Series) -> Series | None:
    """Return ``used`` without the part that the load explains; ``None`` if time and load cannot be told apart."""
    elapsed = times - times.mean()
    most = np.maximum.accumulate(load)
    columns = [column - column.mean() for column in (load, most) if np.ptp(column) > 0]
    if not columns:
        return used
    loads = np.stack(columns, axis=1)
    by_load = np.linalg.lstsq(loads, elapsed, rcond=None)[0]
    unexplained = elapsed - loads @ by_load
    if float(unexplained @ unexplained) < 0.2 * float(elapsed @ elapsed):
        return None
    both = np.column_stack([loads, elapsed])
    weights = np.linalg.lstsq(both, used - used.mean(), rcond=None)[0]
    rest: Series = used - loads @ weights[:-1]
    return rest
