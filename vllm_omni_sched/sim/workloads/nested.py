"""Combine workloads: a mix, and one whose rate goes up and down."""

from collections.abc import Iterator, Mapping
from heapq import merge
from typing import Any

import numpy as np
from pydantic import Field

from vllm_omni_sched.sim.workloads.base import Arrival, Workload, WorkloadOptions
from vllm_omni_sched.sim.workloads.draws import endless
from vllm_omni_sched.sim.workloads.season import Season, SeasonOptions

_CLIENTS_APART = 1_000_000  # distance between the client numbers of two parts


class MixOptions(WorkloadOptions):
    """Options of ``mix``."""

    parts: list[dict[str, Any]] = Field(
        min_length=1,
        description="Tables of other kinds, without `rate`, each with a `weight`: its share of all requests.",
    )


class Mix:
    """Several workloads side by side, in order of time.

    1. Each part has a share of the rate by its weight.
    2. Clients of different parts are different.
    """

    def __init__(self, parts: list[Workload]) -> None:
        self._parts = parts

    @property
    def rate(self) -> float:
        """Return the rate of all parts."""
        return sum(part.rate for part in self._parts)

    @property
    def source(self) -> str:
        """Return the sources of all parts."""
        return "a mix of: " + "; ".join(f"{part.rate:g}/s of {part.source}" for part in self._parts)

    @property
    def thinnable(self) -> bool:
        """Return whether all parts are thinnable."""
        return all(part.thinnable for part in self._parts)

    def arrivals(self, random: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals for as long as any part has some."""

        def one(number: int, part: Workload, generator: np.random.Generator) -> Iterator[Arrival]:
            for arrival in part.arrivals(generator):
                yield arrival._replace(client=arrival.client + number * _CLIENTS_APART) if number else arrival

        generators = random.spawn(len(self._parts))
        streams = [one(n, part, generators[n]) for n, part in enumerate(self._parts)]
        return merge(*streams, key=lambda arrival: arrival.at)


class DayNightOptions(WorkloadOptions, SeasonOptions):
    """Options of ``day-night``: those of `SeasonOptions`, and the workload to vary."""

    of: Mapping[str, Any] = Field(description="The table of another kind, without `rate`.")


class DayNight:
    """Another workload, with a rate that follows `Season`.

    1. The other workload runs at the highest possible rate; requests are left out independently at random so
       that the rate is right at every time ("thinning": Lewis and Shedler, 1979). Between its own bursts,
       little is left of the unevenness of its gaps.
    2. ``rate`` is the mean over whole weeks, without bursts and the change.
    """

    thinnable = True

    def __init__(self, options: DayNightOptions, at_most: Workload) -> None:
        self.rate = options.rate
        self.source = (
            f"seasons of {options.season_seconds:g} s with a peak of {options.peak_ratio:g} times the mean "
            f"(assumed), of: {at_most.source}"
        )
        self._options = options
        self._at_most = at_most

    @staticmethod
    def highest_rate(options: DayNightOptions) -> float:
        """Return the rate at which the other workload must run."""
        return options.rate * Season.largest(options)

    def arrivals(self, random: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals for as long as the other workload has some."""
        inner, whether, season_random = random.spawn(3)
        season, limit = Season(self._options, season_random), Season.largest(self._options)
        chances = endless(whether.random)
        for arrival in self._at_most.arrivals(inner):
            if next(chances) * limit < season.at(arrival.at):
                yield arrival
