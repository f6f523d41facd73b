"""What a run is measured by: histograms of constant size, and one record for each request."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from math import log

_PER_E = 200  # bins for a factor of e: each is half a per cent wide
_LEAST = 1e-6  # seconds; what is shorter counts as that
_FIRST = int(log(_LEAST) * _PER_E)


class Histogram:
    """Durations with weights, in bins half a per cent wide; a quantile is off by a quarter of a per cent at most."""

    __slots__ = ("_bins", "count", "largest", "total")

    def __init__(self) -> None:
        self._bins: dict[int, float] = {}
        self.count = 0.0
        self.total = 0.0
        self.largest = 0.0

    def add(self, seconds: float, weight: float = 1.0) -> None:
        """So long a duration, ``weight`` times."""
        at = int(log(seconds) * _PER_E) if seconds > _LEAST else _FIRST
        bins = self._bins
        if at in bins:
            bins[at] += weight
        else:
            bins[at] = weight
        self.count += weight
        self.total += seconds * weight
        if seconds > self.largest:
            self.largest = seconds

    def clear(self) -> None:
        """Forget all."""
        self._bins.clear()
        self.count = self.total = self.largest = 0.0

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
    """The largest of the last steps, whichever one begins with: for the largest gap of each request, O(1) a step.

    Steps are numbered from 0. A stack of those that no later one exceeds.
    """

    __slots__ = ("_numbers", "_seconds", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self._numbers: list[int] = []
        self._seconds: list[float] = []

    def add(self, seconds: float) -> int:
        """The next step took so long; how many there are now."""
        kept, numbers = self._seconds, self._numbers
        while kept and kept[-1] <= seconds:
            kept.pop()
            numbers.pop()
        kept.append(seconds)
        numbers.append(self.steps)
        self.steps += 1
        return self.steps

    def largest_since(self, step: int) -> float:
        """Of that step and all after it; 0 if there is none."""
        at = bisect_left(self._numbers, step)
        return self._seconds[at] if at < len(self._seconds) else 0.0
