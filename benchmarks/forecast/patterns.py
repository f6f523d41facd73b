"""Generate synthetic arrivals per bin, with the statistics that ServeGen publishes.

From there (`mm-image`, rate-weighted over 35 clients): the CV of a client's inter-arrival times has a median of 1.01
and a 90th percentile of 4.87, and the top 4 clients make 49% of the traffic. A renewal process of that CV gives counts
with a variance of CV² times their mean, drawn here as negative binomials. How the rate goes over the day is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

CLIENTS = 35
ZIPF = 0.863  # weights rank**-ZIPF of 35 clients: the top 4 have 49%
CV_MEDIAN, CV_SIGMA = 1.01, math.log(4.87 / 1.01) / 1.2816  # lognormal through both published points


def _day(t: Series, season: int) -> Series:
    return 1 + 0.7 * np.sin(2 * np.pi * t / season) + 0.15 * np.sin(4 * np.pi * t / season + 1)


def _steady(t: Series, season: int, rng: np.random.Generator) -> Series:
    return np.ones(len(t))


def _day_night(t: Series, season: int, rng: np.random.Generator) -> Series:
    return _day(t, season)


def _week(t: Series, season: int, rng: np.random.Generator) -> Series:
    return _day(t, season) * np.where(t // season % 7 < 5, 1.0, 0.4)


def _growth(t: Series, season: int, rng: np.random.Generator) -> Series:
    return _day(t, season) * (0.5 + 1.5 * t / t[-1])


def _jump(t: Series, season: int, rng: np.random.Generator) -> Series:
    """Return a day whose load triples at one moment of the second half."""
    return _day(t, season) * np.where(t < len(t) * rng.uniform(0.55, 0.8), 0.6, 1.8)


def _moved(t: Series, season: int, rng: np.random.Generator) -> Series:
    """Return a day that begins a quarter earlier from one moment of the second half on."""
    return np.where(t < len(t) * rng.uniform(0.55, 0.8), _day(t, season), _day(t + season / 4, season))


def _wander(t: Series, season: int, rng: np.random.Generator) -> Series:
    """Return a random walk of the logarithm: only the present helps to forecast it."""
    return np.exp(np.clip(np.cumsum(rng.normal(0, 0.1, len(t))), -2, 2))


def _bursts(t: Series, season: int, rng: np.random.Generator) -> Series:
    """Return day and night with occasional bursts of ten times the load, one or two bins long."""
    burst = rng.random(len(t)) < 0.01
    return _day(t, season) * np.where(burst | np.roll(burst, 1) & (rng.random(len(t)) < 0.5), 10.0, 1.0)


PATTERNS: dict[str, Callable[[Series, int, np.random.Generator], Series]] = {
    "day and night": _day_night,
    "weekdays and weekends": _week,
    "growth": _growth,
    "jump": _jump,
    "day moved by 6 h": _moved,
    "bursts": _bursts,
    "steady": _steady,
    "random walk": _wander,
}


def counts(pattern: str, bins: int, season: int, mean: float, seed: int) -> Series:
    """Return the arrivals of all clients in each bin, ``mean`` on average where the pattern is 1."""
    rng = np.random.default_rng([seed, list(PATTERNS).index(pattern)])
    shape = PATTERNS[pattern](np.arange(bins, dtype=np.float64), season, rng)
    weights = np.arange(1, CLIENTS + 1, dtype=np.float64) ** -ZIPF
    total = np.zeros(bins)
    for weight in weights / weights.sum():
        expected = np.maximum(mean * weight * shape, 1e-9)
        square = float(CV_MEDIAN * np.exp(CV_SIGMA * rng.standard_normal())) ** 2
        if square > 1.05:
            # variance = square * expected
            total += rng.negative_binomial(expected / (square - 1), 1 / square)
        else:
            total += rng.poisson(expected)
    return total
