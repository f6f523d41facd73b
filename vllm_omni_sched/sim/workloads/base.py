"""Define the interface of workloads, and draw sizes and times of arrivals."""

import math
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from typing import Any, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.sim.work import Item, Request


class Arrival(NamedTuple):
    """A request without its number; fields as in `Request`."""

    at: float
    text_tokens: int
    output_tokens: int
    items: tuple[Item, ...] = ()
    sla: str = "interactive"
    client: int = 0


class Workload(Protocol):
    """Generates arrivals. It keeps no state: each stream begins at time 0."""

    @property
    def source(self) -> str:
        """Return the source of its statistics, and which are assumed; for results."""

    @property
    def rate(self) -> float:
        """Return the mean requests per second."""

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield all arrivals in order of time, made on demand; without end unless the workload says otherwise."""


class WorkloadOptions(BaseModel):
    """Options that every kind has. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rate: float = Field(gt=0, allow_inf_nan=False, description="Mean requests per second.")


class ServedOptions(WorkloadOptions):
    """Options of kinds that do not fix the class of their requests."""

    sla: str = Field("interactive", min_length=1, description="The class of its requests.")


def requests(workload: Workload, seed: int) -> Iterator[Request]:
    """Yield the requests of a workload; the same for the same seed.

    Kinds draw times and contents from separate generators: another rate gives the same requests, at other times.

    Raises:
        ValueError: the seed is negative.
    """
    for number, arrival in enumerate(workload.arrivals(np.random.default_rng(seed))):
        at, text_tokens, output_tokens, items, sla, client = arrival
        yield Request(number, at, text_tokens, output_tokens, items, sla, client)


_BLOCK = 256


def endless(draw: Callable[[int], Any]) -> Iterator[Any]:
    """Yield the values of ``draw(n)``, an array of n of them, one by one without end; drawn in blocks."""
    while True:
        yield from draw(_BLOCK).tolist()


def contents(rng: np.random.Generator) -> Iterator[int]:
    """Yield contents of items that are all different."""
    return endless(lambda number: rng.integers(1 << 62, size=number))


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

    def draw(self, rng: np.random.Generator, number: int) -> Any:
        """Return so many draws, each 1 or more."""
        return self.at(rng.random(number))

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

    def draw(self, rng: np.random.Generator, number: int) -> Any:
        """Return so many draws."""
        return self._values[np.searchsorted(self._ends, rng.random(number), side="right")]


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


def gamma_times(rng: np.random.Generator, rate: float, cv: float = 1.0) -> Iterator[float]:
    """Yield times with Gamma gaps of that mean rate and coefficient of variation; 1: a Poisson process, 0: even gaps.

    The process has been running before time 0: the first time is the rest of a gap, so the rate is the
    same from the start. (With an ordinary first gap, (cv^2 - 1) / 2 arrivals too many would come early: Cox, Renewal
    Theory, 1962.)
    """
    if cv == 0:
        at = float(rng.random()) / rate
        while True:
            yield at
            at += 1.0 / rate
    shape = 1.0 / cv**2
    scale = 1.0 / (rate * shape)
    at = float(rng.random() * rng.gamma(shape + 1, scale))
    for gap in endless(lambda number: rng.gamma(shape, scale, number)):
        yield at
        at += gap


def client_times(rng: np.random.Generator, clients: list[tuple[float, float]]) -> Iterator[tuple[float, int]]:
    """Yield (time, client) of several clients that each have a (rate, coefficient of variation)."""

    def one(number: int, generator: np.random.Generator, rate: float, cv: float) -> Iterator[tuple[float, int]]:
        return ((at, number) for at in gamma_times(generator, rate, cv))

    generators = rng.spawn(len(clients))
    return merge(*(one(number, generators[number], *client) for number, client in enumerate(clients)))


def skewed(number: int, first: int, part: float) -> list[float]:
    """Return ``number`` fractions that sum to 1, the n-th as 1/n^s, with s such that the first ones sum to ``part``."""
    low, high = 0.0, 8.0
    ranks = np.arange(1, number + 1, dtype=float)
    weights = ranks
    for _ in range(60):
        middle = (low + high) / 2
        weights = ranks**-middle
        weights /= weights.sum()
        low, high = (middle, high) if math.fsum(weights[:first]) < part else (low, middle)
    return [float(weight) for weight in weights]
