"""Latency histograms: counts in a fixed set of buckets, and quantiles from them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

STEPS = 8
"""Buckets per doubling. A quantile is off by half a bucket at most: 4.5 %."""
SHORTEST, LONGEST = -16, 6  # exponents of 2: 15 µs to 64 s, in seconds; what is outside is in the first or last bucket
BOUNDS = [2.0 ** (number / STEPS) for number in range(SHORTEST * STEPS, LONGEST * STEPS)]
"""Upper bounds of all buckets but the last, in seconds."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class LatencyHistogram:
    """Histogram of durations. Several threads may observe; a lost count does not matter to quantiles.

    Attributes:
        sum: the sum of all observations, in seconds.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; negative ones count as zero."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        if seconds > 0:
            self.sum += seconds

    def add(self, other: LatencyHistogram) -> None:
        """Add the counts of another histogram."""
        self._counts = [own + more for own, more in zip(self._counts, other._counts, strict=True)]
        self.sum += other.sum

    @property
    def count(self) -> int:
        """Return the number of observations."""
        return sum(self._counts)

    def quantile(self, q: float) -> float | None:
        """Return the quantile ``q``, 0 < q <= 1, in seconds; None without observations."""
        counts = self._counts.copy()
        rank, seen = q * sum(counts), 0
        for number, count in enumerate(counts, SHORTEST * STEPS):
            seen += count
            if count and seen >= rank:
                return float(2 ** ((number - 0.5) / STEPS))
        return None

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield upper bounds in seconds with the number of observations not above them, one per doubling."""
        counts = self._counts.copy()
        for exponent in range(SHORTEST, LONGEST):
            yield 2.0**exponent, sum(counts[: (exponent - SHORTEST) * STEPS + 1])

    def facts(self) -> Mapping[str, float]:
        """Return `count` and quantiles in seconds, for `Health.facts`."""
        found = {name: self.quantile(q) for name, q in QUANTILES.items()}
        return {"count": self.count, **{name: round(value, 7) for name, value in found.items() if value is not None}}
