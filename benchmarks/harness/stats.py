"""Summaries of timing samples. Pure: no clock, no I/O."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Summary:
    """Repeated samples of one quantity, in their unit; whether ``least`` or ``most`` is good, it does not say."""

    median: float
    least: float
    most: float
    iqr: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Raises ValueError when there is no sample."""
        if not samples:
            raise ValueError("a summary needs at least one sample")
        low, high = quantile(samples, 0.25), quantile(samples, 0.75)
        return cls(statistics.median(samples), min(samples), max(samples), high - low, len(samples))

    def as_dict(self, digits: int = 6) -> dict[str, float]:
        return {key: round(value, digits) for key, value in asdict(self).items()}


def bounds(record: Mapping[str, float]) -> tuple[float, float]:
    """Return the least and the most of a summary in a result file, whose older ones call them best and worst."""
    return (record["least"], record["most"]) if "least" in record else (record["best"], record["worst"])


def quantile(samples: Sequence[float], q: float) -> float:
    """Return the q-quantile by linear interpolation between order statistics, 0 <= q <= 1."""
    return float(np.quantile(samples, q))


def median_interval(
    samples: Sequence[float], rng: random.Random, confidence: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile-bootstrap confidence interval of the median of `samples`; of one sample, the sample itself."""
    medians = [statistics.median(rng.choices(samples, k=len(samples))) for _ in range(resamples)]
    outside = (1 - confidence) / 2
    return quantile(medians, outside), quantile(medians, 1 - outside)


def fitted_exponent(cost_by_size: Mapping[int, float], smallest: int = 1024) -> float | None:
    """Fit e of cost = a * size**e by least squares in log-log, over sizes >= `smallest`.

    Below that a step's fixed cost hides the growth. None when fewer than two usable points are left.
    """
    points = [(math.log(n), math.log(cost)) for n, cost in cost_by_size.items() if n >= smallest and cost > 0]
    return float(np.polyfit(*zip(*points, strict=True), 1)[0]) if len(points) > 1 else None
