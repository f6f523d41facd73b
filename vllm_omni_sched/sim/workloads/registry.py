"""List all kinds of workloads by name, and make one from a table of options."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.sim.workloads.base import Workload
from vllm_omni_sched.sim.workloads.composite import DayNight, DayNightOptions, Mix, MixOptions
from vllm_omni_sched.sim.workloads.production import (
    AzureImages,
    AzureOptions,
    ServeGenImages,
    ServeGenOptions,
    ServeGenText,
)
from vllm_omni_sched.sim.workloads.replay import Replay, TraceOptions
from vllm_omni_sched.sim.workloads.statistics import DerivedLoad, StatisticsOptions, read_statistics
from vllm_omni_sched.sim.workloads.synthetic import (
    ClipsOptions,
    MixedLoad,
    MixedOptions,
    Poisson,
    PoissonOptions,
    Realtime,
    RealtimeOptions,
    VideoClips,
)
from vllm_omni_sched.sim.workloads.trace import read_trace

_MADE: dict[str, tuple[type[BaseModel], Callable[[Any], Workload]]] = {
    "servegen-mm-image": (ServeGenOptions, ServeGenImages),
    "azure-lmm": (AzureOptions, AzureImages),
    "video-clips": (ClipsOptions, VideoClips),
    "text": (ServeGenOptions, ServeGenText),
    "mixed": (MixedOptions, MixedLoad),
    "realtime": (RealtimeOptions, Realtime),
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
    inner = _inner(options.of, DayNight.highest_rate(options), f"{where} of", folder)
    if not inner.thinnable:
        raise ConfigError(
            f"{where} of: the items of 'realtime' arrive at fixed times and cannot be thinned: put it in a 'mix'"
        )
    return DayNight(options, inner)


def _inner(table: Mapping[str, Any], rate: float, where: str, folder: Path | None) -> Workload:
    if "rate" in table or "scale" in table:
        key = "rate" if "rate" in table else "scale"
        raise ConfigError(f"{where}: option {key!r} belongs to the enclosing table: remove it here")
    return build({**table, "rate": rate}, where, folder)
