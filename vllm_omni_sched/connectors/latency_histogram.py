"""Latency histograms: counts in a fixed set of buckets, and quantiles from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

STEPS = 8
"""Buckets per doubling. A quantile is off by half a bucket at most: 4.5 %."""
SHORTEST, LONGEST = -16, 6  # exponents of 2: 15 µs to 64 s, in seconds; what is outside is in the first or last bucket
MANY = 1024
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class LatencyHistogram:
    """A histogram of seconds. Several threads may observe; a lost count does not matter to quantiles."""

    def __init__(self) -> None:
        self._new: list[float] = []  # sorted into buckets when somebody asks, or when there are many
        self._counts: Counter[int] = Counter()  # by number of the bucket, which ends at 2 ** (number / STEPS)
        self._count, self._sum = 0, 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; negative ones count as zero."""
        self._new.append(seconds)
        if len(self._new) >= MANY:
            self._sort()

    def add(self, other: LatencyHistogram) -> None:
        """Add the counts of another histogram."""
        other._sort()
        self._counts.update(other._counts.copy())
        self._count += other._count
        self._sum += other._sum

    @property
    def count(self) -> int:
        """The number of observations."""
        self._sort()
        return self._count

    @property
    def sum(self) -> float:
        """The sum of all observations, in seconds."""
        self._sort()
        return self._sum

    def _sort(self) -> None:
        while self._new:
            try:
                seconds = self._new.pop()
            except IndexError:  # another thread has sorted it
                return
            number = math.ceil(math.log2(seconds) * STEPS) if seconds > 0 else SHORTEST * STEPS
            number = min(max(number, SHORTEST * STEPS), LONGEST * STEPS)
            if number < LONGEST * STEPS and seconds > 2.0 ** (number / STEPS):  # the logarithm was rounded down
                number += 1
            self._counts[number] += 1
            self._count += 1
            self._sum += max(seconds, 0.0)

    def quantile(self, q: float) -> float | None:
        """Return the value of that rank, 0 < q <= 1, in seconds; None without observations."""
        self._sort()
        counts = sorted(self._counts.copy().items())
        rank, seen = q * sum(count for _, count in counts), 0
        for number, count in counts:
            seen += count
            if seen >= rank:
                return float(2 ** ((number - 0.5) / STEPS))
        return None

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield upper bounds in seconds with the number of observations not above them, one per doubling."""
        self._sort()
        counts = sorted(self._counts.copy().items())
        for exponent in range(SHORTEST, LONGEST):
            yield 2.0**exponent, sum(count for number, count in counts if number <= exponent * STEPS)

    def facts(self) -> Mapping[str, float]:
        """Return `count` and quantiles in seconds, for `Health.facts`."""
        found = {name: self.quantile(q) for name, q in QUANTILES.items()}
        return {"count": self.count, **{name: round(value, 7) for name, value in found.items() if value is not None}}
