"""What a run is measured by: histograms of constant size, and one record for each request."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from itertools import chain

import numpy as np

_PER_E = 200  # bins for a factor of e: each is half a per cent wide
_LEAST = 1e-6  # seconds; what is shorter counts as that
_BLOCK = 4096  # durations that are put into bins together


class Histogram:
    """Durations with weights, in bins half a per cent wide; a quantile is off by a quarter of a per cent at most.

    What is added is put into its bin some thousand at a time, or when somebody asks.
    """

    __slots__ = ("_bins", "_count", "_largest", "_listed", "_lists", "_new", "_total")

    def __init__(self) -> None:
        self._bins: dict[int, float] = {}
        self._count = 0.0
        self._total = 0.0
        self._largest = 0.0
        self._new: list[tuple[float, float]] = []  # not in their bins yet; nor are these
        self._lists: list[tuple[list[float], float]] = []
        self._listed = 0

    def add(self, seconds: float, weight: float = 1.0) -> None:
        """So long a duration, ``weight`` times."""
        new = self._new
        new.append((seconds, weight))
        if len(new) >= _BLOCK:
            self._fold()

    def add_all(self, seconds: list[float], weight: float) -> None:
        """Each of them ``weight`` times. They are kept as they are: not to be changed any more."""
        self._lists.append((seconds, weight))
        self._listed += len(seconds)
        if self._listed >= _BLOCK:
            self._fold()

    def _fold(self) -> None:
        if not self._new and not self._lists:
            return
        lists = [[one for one, _ in self._new], *(one for one, _ in self._lists)]
        each = np.repeat([weight for _, weight in self._lists], [len(one) for one in lists[1:]])
        weights = np.concatenate(([weight for _, weight in self._new], each))
        seconds = np.fromiter(chain.from_iterable(lists), dtype=float, count=len(weights))
        self._new.clear()
        self._lists.clear()
        self._listed = 0
        at = (np.log(np.maximum(seconds, _LEAST)) * _PER_E).astype(np.int64)
        first = int(at.min())
        counts = np.bincount(at - first, weights)
        bins = self._bins
        for position in np.flatnonzero(counts).tolist():
            bins[first + position] = bins.get(first + position, 0.0) + float(counts[position])
        # one after the other, as a loop would: a sum by halves has other last digits
        self._count = float(np.add.accumulate(np.append(self._count, weights))[-1])
        self._total = float(np.add.accumulate(np.append(self._total, seconds * weights))[-1])
        self._largest = max(self._largest, float(seconds.max()))

    def clear(self) -> None:
        """Forget all."""
        self._bins.clear()
        self._new.clear()
        self._lists.clear()
        self._listed = 0
        self._count = self._total = self._largest = 0.0

    @property
    def count(self) -> float:
        """The weight of all."""
        self._fold()
        return self._count

    @property
    def total(self) -> float:
        """Seconds, by their weight."""
        self._fold()
        return self._total

    @property
    def largest(self) -> float:
        """The longest; 0 while there is nothing."""
        self._fold()
        return self._largest

    @property
    def mean(self) -> float:
        """0 while there is nothing."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """The duration that ``part`` of the weight does not exceed; 0 while there is nothing."""
        left = part * self.count
        for at in sorted(self._bins):
            left -= self._bins[at]
            if left <= 0:
                # int() rounds towards 0, which is up for what is shorter than a second
                return min(math.exp((at - 0.5 if at <= 0 else at + 0.5) / _PER_E), self.largest)
        return self.largest


class Outcome(str, Enum):
    """How a request left."""

    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Record:
    """One request that left. Times are seconds since the start; ``inf``: never.

    ``first``: its first token; ``largest_gap``: between two of its tokens, in seconds.
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
        """Time to first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 for a single one."""
        return (self.end - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def meets(self, ttft_seconds: float, itl_seconds: float) -> bool:
        """Whether its first token and each of its later ones came in time."""
        return self.outcome is Outcome.DONE and self.ttft <= ttft_seconds and self.largest_gap <= itl_seconds


class Gaps:
    """The largest of the last steps, from marks on: for the largest gap of each request, O(1) a step.

    Steps are numbered from 0. A stack of stretches between marks that no later one exceeds, and the stretch since the
    last mark, of which only the largest step is kept.

    ``steps``: so far. ``largest``: of those since the last mark. Whoever has the steps brings both up to date.
    """

    __slots__ = ("_marked", "_numbers", "_seconds", "largest", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.largest = 0.0
        self._marked = 0
        self._numbers: list[int] = []  # of the first step of each stretch
        self._seconds: list[float] = []

    def mark(self) -> int:
        """The number of the next step, for `largest_since`."""
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
        """Of that step, which `mark` has returned, and all after it; 0 if there is none."""
        self.mark()
        at = bisect_left(self._numbers, step)
        return self._seconds[at] if at < len(self._seconds) else 0.0
