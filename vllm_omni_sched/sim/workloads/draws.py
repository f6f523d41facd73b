"""Define distributions through published quantiles, and endless draws from them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

_BLOCK = 256


def endless(draw: Callable[[int], Any]) -> Iterator[Any]:
    """Yield the values of ``draw(n)``, an array of n of them, one by one without end; drawn in blocks."""
    while True:
        yield from draw(_BLOCK).tolist()


def contents(random: np.random.Generator) -> Iterator[int]:
    """Yield contents of items that are all different."""
    return endless(lambda number: random.integers(1 << 62, size=number))


class Quantiles:
    """Whole numbers whose distribution passes through published quantiles: straight lines between them in log(value).

    1. ``points`` are (fraction, value): that fraction does not exceed the value. Both rise. The last fraction is 1.
    2. The least value, at fraction 0, is fitted so that the mean is the published one.

    Source: the method is ours, the points come from the caller.

    Raises:
        ValueError: the points do not rise, or no least value gives that mean.
    """

    def __init__(self, points: Sequence[tuple[float, float]], mean: float) -> None:
        parts, values = zip(*points, strict=True)
        if parts[-1] != 1 or not (np.diff((0.0, *parts)) > 0).all() or not (np.diff((0.0, *values)) > 0).all():
            raise ValueError(f"points must rise up to part 1, got {points}")
        self._parts = np.array((0.0, *parts))
        low, high = 1e-6, values[0] * (1 - 1e-9)
        if not _mean(self._parts, (low, *values)) <= mean <= _mean(self._parts, (high, *values)):
            raise ValueError(f"no least value gives the mean {mean} with {points}")
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean(self._parts, (middle, *values)) < mean else (low, middle)
        self._logs = np.log((low, *values))

    def draw(self, random: np.random.Generator, number: int) -> Any:
        """Return so many draws, each 1 or more."""
        return self.at(random.random(number))

    def at(self, parts: Any) -> Any:
        """Return the values of these quantiles, each between 0 and 1."""
        return np.maximum(1, np.rint(np.exp(np.interp(parts, self._parts, self._logs)))).astype(np.int64)


def _mean(parts: Any, values: Sequence[float]) -> float:
    """Return the mean for straight lines in log(value): the integral of exp over each."""
    found = np.array(values)
    return float((np.diff(parts) * np.diff(found) / np.diff(np.log(found))).sum())


class Counts:
    """Whole numbers with their probabilities.

    Raises:
        ValueError: they do not sum to 1.
    """

    def __init__(self, probabilities: dict[int, float]) -> None:
        self._values = np.array(list(probabilities))
        ends = np.cumsum(list(probabilities.values()))
        if abs(ends[-1] - 1) > 1e-6:
            raise ValueError(f"probabilities must sum to 1, got {ends[-1]}")
        self._ends = ends / ends[-1]

    def draw(self, random: np.random.Generator, number: int) -> Any:
        """Return so many draws."""
        return self._values[np.searchsorted(self._ends, random.random(number), side="right")]


def spread(values: Sequence[int], probability: float, mean: float | None = None) -> dict[int, float]:
    """Spread a probability over whole numbers: evenly, or geometrically so that they have the given mean."""
    low, high = -2.0, 2.0
    found = np.array(values, dtype=float)
    weights = np.ones(len(found))
    if mean is not None:
        for _ in range(100):
            slope = (low + high) / 2
            weights = np.exp(slope * (found - found[0] if slope < 0 else found - found[-1]))
            low, high = (slope, high) if float(found @ weights / weights.sum()) < mean else (low, slope)
    return dict(zip(values, (probability * weights / weights.sum()).tolist(), strict=True))
