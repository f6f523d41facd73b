"""List all kinds of workloads by name, and make one from a table of options; with those that consist of others:
several side by side, and one whose rate follows seasons, noise and a change.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.sim.workloads.base import Arrival, ServedOptions, Workload, WorkloadOptions, endless
from vllm_omni_sched.sim.workloads.kinds import (
    ClipsOptions,
    Poisson,
    PoissonOptions,
    ServeGenImages,
    ServeGenText,
    VideoClips,
)
from vllm_omni_sched.sim.workloads.replay import DerivedLoad, Replay, StatisticsOptions, TraceOptions, read_statistics
from vllm_omni_sched.sim.workloads.trace import read_trace

_NOISE_LIMIT = 3.0  # standard deviations
_NOISE_STEPS = 96  # per season: quarters of an hour of a day


class SeasonOptions(BaseModel):
    """Options of `Season`. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    season_seconds: float = Field(86_400.0, gt=0, allow_inf_nan=False, description="Length of a season, such as a day.")
    peak_ratio: float = Field(2.0, ge=1, le=20, description="The rate at the peak of a season relative to its mean.")
    peak_at: float = Field(0.6, ge=0, lt=1, description="Time of the peak, as a fraction of the season.")
    noise: float = Field(
        0.0, ge=0, le=1, description="Standard deviation of log(rate) from one 96th of a season to another."
    )
    change_at_seconds: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Time of a lasting change of the load; 0: never."
    )
    change_ratio: float = Field(2.0, ge=0, le=100, description="Factor on the rate after the change.")
    change_shift: float = Field(
        0.0, ge=0, lt=1, description="How much earlier peaks are after the change, as a fraction of the season."
    )


class Season:
    """Factor on the mean rate as a function of time; times must be requested in order.

    1. A season is exp(k cos x) / I0(k), with k such that its peak is ``peak_ratio``; its mean is 1.
    2. Noise is lognormal with mean 1, drawn for each 96th of a season, cut off at 3 standard deviations.
    3. The change is added: a forecast does not know it, and it changes the mean.

    Source: the form is that of von Mises, as a positive season with one peak; the parameters come from the caller.
    """

    def __init__(self, options: SeasonOptions, rng: np.random.Generator) -> None:
        self._options = options
        self._k = _sharpness(options.peak_ratio)
        self._mean = float(np.i0(self._k))
        (self._noise_rng,) = rng.spawn(1)
        self._noise, self._noise_step = 1.0, -1

    @staticmethod
    def largest(options: SeasonOptions) -> float:
        """Return the upper bound of the factor with these options."""
        change = max(1.0, options.change_ratio) if options.change_at_seconds else 1.0
        noise = math.exp(options.noise * _NOISE_LIMIT)
        # the season is fitted to the peak, so it may exceed it by rounding
        return options.peak_ratio * (1 + 1e-9) * noise * change

    def at(self, when: float) -> float:
        """Return the factor at that many seconds, which must not be before the last time requested."""
        options = self._options
        season, factor = when / options.season_seconds, 1.0
        if options.change_at_seconds and when >= options.change_at_seconds:
            factor *= options.change_ratio
            season += options.change_shift
        factor *= math.exp(self._k * math.cos(2 * math.pi * (season - options.peak_at))) / self._mean
        if options.noise:
            factor *= self._noise_at(int(when / options.season_seconds * _NOISE_STEPS))
        return factor

    def _noise_at(self, step: int) -> float:
        while self._noise_step < step:
            self._noise_step += 1
            deviations = min(_NOISE_LIMIT, float(self._noise_rng.standard_normal()))
            self._noise = math.exp(self._options.noise * deviations - self._options.noise**2 / 2)
        return self._noise


def _sharpness(peak_ratio: float) -> float:
    """Return k for which exp(k) / I0(k) is the ratio; about sqrt(2 pi k) for large k."""
    low, high = 0.0, 700.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.exp(middle) / float(np.i0(middle)) < peak_ratio else (low, middle)
    return low


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

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals for as long as any part has some."""

        def one(number: int, part: Workload, generator: np.random.Generator) -> Iterator[Arrival]:
            for arrival in part.arrivals(generator):
                yield arrival._replace(client=arrival.client + number * _CLIENTS_APART) if number else arrival

        generators = rng.spawn(len(self._parts))
        streams = [one(n, part, generators[n]) for n, part in enumerate(self._parts)]
        return merge(*streams, key=lambda arrival: arrival.at)


class DayNightOptions(WorkloadOptions, SeasonOptions):
    """Options of ``day-night``: those of `SeasonOptions`, and the workload to vary."""

    of: Mapping[str, Any] = Field(description="The table of another kind, without `rate`.")


class DayNight:
    """Another workload, with a rate that follows `Season`.

    1. The other workload runs at the highest possible rate; requests are left out independently at random so
       that the rate is right at every time ("thinning": Lewis and Shedler, 1979). Little is left of the unevenness of
       its gaps.
    2. ``rate`` is the mean over whole seasons, without the change.
    """

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

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals for as long as the other workload has some."""
        inner, whether, season_rng = rng.spawn(3)
        season, limit = Season(self._options, season_rng), Season.largest(self._options)
        chances = endless(whether.random)
        for arrival in self._at_most.arrivals(inner):
            if next(chances) * limit < season.at(arrival.at):
                yield arrival


_MADE: dict[str, tuple[type[BaseModel], Callable[[Any], Workload]]] = {
    "servegen-mm-image": (ServedOptions, ServeGenImages),
    "video-clips": (ClipsOptions, VideoClips),
    "text": (ServedOptions, ServeGenText),
    "poisson": (PoissonOptions, Poisson),
}

KINDS: dict[str, type[BaseModel]] = {kind: options for kind, (options, _) in _MADE.items()} | {
    "mix": MixOptions,
    "day-night": DayNightOptions,
    "trace": TraceOptions,
    "statistics": StatisticsOptions,
}
"""The options of each kind."""


def build(table: Mapping[str, Any], where: str = "[workload]", folder: Path | None = None) -> Workload:
    """Return the workload of a table: ``kind``, and the options of that kind.

    Args:
        table: as read from TOML.
        where: source of the table, for messages.
        folder: folder to which the file of a trace or of statistics is relative; default: the working directory.

    Raises:
        ConfigError: an option is unknown, missing, of the wrong type or out of range, or a trace cannot be used. The
            message names the key, or the file and line.
    """
    given = dict(table)
    kind = given.pop("kind", None)
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS)
        raise ConfigError(f"{where}: option 'kind' must be one of {list(KINDS)}, got {kind!r}{hint and f'; {hint}'}")
    options: Any = read_options(KINDS[kind], given, where)
    if kind == "mix":
        return _mix(options, where, folder)
    if kind == "day-night":
        return _day_night(options, where, folder)
    if kind == "trace":
        return Replay(read_trace((folder or Path()) / options.file), options)
    if kind == "statistics":
        return DerivedLoad(read_statistics((folder or Path()) / options.file), options)
    return _MADE[kind][1](options)


def _mix(options: MixOptions, where: str, folder: Path | None) -> Mix:
    tables, weights = [], []
    for number, part in enumerate(options.parts):
        table = dict(part)
        weight = table.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise ConfigError(f"{where} parts[{number}]: option 'weight' must be a positive number, got {weight!r}")
        tables.append(table)
        weights.append(weight)
    rates = [options.rate * weight / sum(weights) for weight in weights]
    return Mix([_inner(table, rates[n], f"{where} parts[{n}]", folder) for n, table in enumerate(tables)])


def _day_night(options: DayNightOptions, where: str, folder: Path | None) -> DayNight:
    return DayNight(options, _inner(options.of, DayNight.highest_rate(options), f"{where} of", folder))


def _inner(table: Mapping[str, Any], rate: float, where: str, folder: Path | None) -> Workload:
    if "rate" in table or "scale" in table:
        key = "rate" if "rate" in table else "scale"
        raise ConfigError(f"{where}: option {key!r} belongs to the enclosing table: remove it here")
    return build({**table, "rate": rate}, where, folder)
