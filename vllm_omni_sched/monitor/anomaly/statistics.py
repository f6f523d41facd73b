"""Compute statistics that are robust to outliers, and test whether a series rises."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, pvariance

import numpy as np
from numpy.typing import NDArray

MAD_TO_SIGMA = 1.4826
"""Factor from the median absolute deviation of normal samples to their standard deviation."""


def centre_and_spread(values: Sequence[float], least_spread: float) -> tuple[float, float]:
    """Return the median, and 1.4826 times the median absolute deviation, the latter at least ``least_spread``."""
    centre = median(values)
    return centre, max(MAD_TO_SIGMA * median(abs(value - centre) for value in values), least_spread)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median slope of ``y`` over ``x`` between points of the lower and of the upper half of ``x``.

    This is Sen's estimate on n/2 of its pairs, those far apart; 0 if ``x`` does not vary.
    """
    order = sorted(range(len(x)), key=x.__getitem__)
    half = len(order) // 2
    pairs = [(low, high) for low, high in zip(order, order[-half:], strict=False) if x[high] > x[low]]
    return median((y[high] - y[low]) / (x[high] - x[low]) for low, high in pairs) if pairs else 0.0


def gamma_quantile(samples: Sequence[float], beyond: float) -> float:
    """Return the value exceeded with probability ``beyond`` by a gamma variable with the moments of ``samples``.

    Wilson and Hilferty, "The Distribution of Chi-Square", 1931: the cube root of a gamma variable is almost normal.
    """
    mean = fmean(samples)
    if mean <= 0:
        return 0.0
    shape = min(mean * mean / max(pvariance(samples), 1e-12 * mean * mean), 1e6)
    z = NormalDist().inv_cdf(1 - beyond)
    root = 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))
    return mean * max(root, 0.0) ** 3


def wilson(failed: float, total: float, z: float) -> tuple[float, float]:
    """Return lower and upper bound of a rate of which ``failed`` of ``total`` were observed (Wilson, 1927)."""
    if total <= 0:
        return 0.0, 1.0
    rate, square = failed / total, z * z / total
    middle = (rate + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(rate * (1 - rate) / total + square / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


Series = NDArray[np.float64]


@dataclass(frozen=True)
class Trend:
    """Result of a trend test. ``slope``: Sen's, per unit of time. ``p``: probability of such a rise by chance.
    ``inflation``: factor on the variance."""

    slope: float
    p: float
    inflation: float


def mann_kendall(times: Series, values: Series) -> Trend:
    """Run the Mann-Kendall test for a rise, with Sen's slope.

    Correlated neighbours look like a trend: the variance is corrected for the autocorrelation of the
    ranks, with the trend taken off (Hamed and Rao, "A modified Mann-Kendall trend test for autocorrelated data", 1998).
    Unlike there, correlation never lowers the variance: a leak found later costs less than a false alarm.
    Most values must differ; O(n²).
    """
    n = len(values)
    first, second = np.triu_indices(n, 1)
    rises = values[second] - values[first]
    slope = float(np.median(rises / (times[second] - times[first])))
    score = float(np.sign(rises).sum())
    variance = n * (n - 1) * (2 * n + 5) / 18
    ranks = np.argsort(np.argsort(values - slope * times)).astype(np.float64)
    ranks -= ranks.mean()
    total = float(ranks @ ranks)
    extra = 0.0
    for lag in range(1, n - 2):
        correlation = float(ranks[:-lag] @ ranks[lag:]) / total
        # Few pairs give no evidence, and far lags of short series are noise.
        if lag <= n // 3 and abs(correlation) > 1.96 / math.sqrt(n):
            extra += (n - lag) * (n - lag - 1) * (n - lag - 2) * correlation
    inflation = max(1.0, 1 + 2 * extra / (n * (n - 1) * (n - 2)))
    z = (score - math.copysign(1, score)) / math.sqrt(variance * inflation) if score else 0.0
    return Trend(slope, 1 - NormalDist().cdf(z), inflation)
