"""Compute statistics that are robust to outliers."""

import math
from collections.abc import Sequence
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


Series = NDArray[np.float64]
