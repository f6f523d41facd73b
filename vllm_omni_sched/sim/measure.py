"""Measure runs with histograms of constant size and one record per request."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

import numpy as np

_PER_E = 200  # bins per factor of e: each is half a per cent wide
_LEAST = 1e-6  # seconds; shorter durations count as this
_BLOCK = 4096  # durations that are sorted into bins together


class Histogram:
    """Durations with weights, in bins half a per cent wide; a quantile is off by a quarter of a per cent at most.

    Durations are sorted into bins some thousand at a time, or when a value is read.
    """

    __slots__ = ("_bins", "_count", "_largest", "_new", "_total")

    def __init__(self) -> None:
        self._bins: dict[int, float] = {}
        self._count = 0.0
        self._total = 0.0
        self._largest = 0.0
        self._new: list[tuple[float, float]] = []  # not in their bins yet

    def add(self, seconds: float, weight: float = 1.0) -> None:
        """Add a duration with a weight."""
        new = self._new
        new.append((seconds, weight))
        if len(new) >= _BLOCK:
            self._fold()

    def _fold(self) -> None:
        if not self._new:
            return
        seconds, weights = np.array(self._new).T
        self._new.clear()
        at = (np.log(np.maximum(seconds, _LEAST)) * _PER_E).astype(np.int64)
        first = int(at.min())
        counts = np.bincount(at - first, weights)
        bins = self._bins
        for position in np.flatnonzero(counts).tolist():
            bins[first + position] = bins.get(first + position, 0.0) + float(counts[position])
        # one after the other, as in a loop: a pairwise sum has other last digits
        self._count = float(np.add.accumulate(np.append(self._count, weights))[-1])
        self._total = float(np.add.accumulate(np.append(self._total, seconds * weights))[-1])
        self._largest = max(self._largest, float(seconds.max()))

    def clear(self) -> None:
        """Remove all durations."""
        self._bins.clear()
        self._new.clear()
        self._count = self._total = self._largest = 0.0

    @property
    def count(self) -> float:
        """Return the total weight."""
        self._fold()
        return self._count

    @property
    def total(self) -> float:
        """Return the weighted sum in seconds."""
        self._fold()
        return self._total

    @property
    def largest(self) -> float:
        """Return the longest duration; 0 if there is none."""
        self._fold()
        return self._largest

    @property
    def mean(self) -> float:
        """Return the mean duration; 0 if there is none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """Return the duration that ``part`` of the weight does not exceed; 0 if there is none."""
        left = part * self.count
        for at in sorted(self._bins):
            left -= self._bins[at]
            if left <= 0:
                # int() rounds towards 0, which is up for durations below a second
                return min(math.exp((at - 0.5 if at <= 0 else at + 0.5) / _PER_E), self.largest)
        return self.largest


class Outcome(str, Enum):
    """Outcome of a request."""

    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Record:
    """A request that left. Times are seconds since the start; ``inf``: never.

    ``first``: time of its first token; ``largest_gap``: largest time between two of its tokens, in seconds.
    """

    number: int
    arrival: float
    modality: str
    sla: str
    first: float
    end: float
    output_tokens: int
    largest_gap: float
    outcome: Outcome
    attempts: int = 1

    @property
    def ttft(self) -> float:
        """Return the time to first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Return the mean time per output token after the first; 0 for a single token."""
        return (self.end - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Gaps:
    """Largest step since a mark, to find the largest gap of each request in O(1) per step.

    Steps are numbered from 0. A stack holds stretches between marks that no later one exceeds, and the stretch since
    the last mark, of which only the largest step is kept.

    ``steps``: number so far. ``largest``: largest since the last mark. The owner of the steps updates both.
    """

    __slots__ = ("_marked", "_numbers", "_seconds", "largest", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.largest = 0.0
        self._marked = 0
        self._numbers: list[int] = []  # first step of each stretch
        self._seconds: list[float] = []

    def mark(self) -> int:
        """Return the number of the next step, for `largest_since`."""
        if self.steps > self._marked:
            kept, numbers, largest = self._seconds, self._numbers, self.largest
            while kept and kept[-1] <= largest:
                kept.pop()
                numbers.pop()
            kept.append(largest)
            numbers.append(self._marked)
            self._marked, self.largest = self.steps, 0.0
        return self.steps

    def largest_since(self, step: int) -> float:
        """Return the largest of that step, a return value of `mark`, and all later ones; 0 if there is none."""
        self.mark()
        at = bisect_left(self._numbers, step)
        return self._seconds[at] if at < len(self._seconds) else 0.0
