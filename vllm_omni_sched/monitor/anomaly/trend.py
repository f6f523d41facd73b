"""Test whether a series rises, and estimate how fast."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

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
