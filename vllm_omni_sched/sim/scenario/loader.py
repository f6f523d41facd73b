"""Load a scenario from TOML: typed, with names that exist, values overridden by dotted keys, and checked."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, load_config, read_options
from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.stage_yaml import check_against, edge_connectors, read_stage_options
from vllm_omni_sched.sim.costs.hardware import DEVICES
from vllm_omni_sched.sim.costs.models import MODELS
from vllm_omni_sched.sim.scenario.explain import explain_problem
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.scenario.stages import VideoStage
from vllm_omni_sched.sim.workloads import registry
from vllm_omni_sched.sim.workloads.replay import Replay, TraceOptions
from vllm_omni_sched.sim.workloads.trace import read_trace
from vllm_omni_sched.video.options import VideoOptions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def value_of(text: str) -> Any:
    """Return a value written in TOML; anything else is text, so that quotes may be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted keys; an empty table is a value.

    So ``{"policy.encode_ahead": true}`` and ``{"policy": {"encode_ahead": true}}`` are the same.
    """
    return dict(_flatten(tables, prefix))


def _flatten(tables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values by dotted keys; of equal keys the last one, at its later place.

    `apply` keeps that order, so a later ``stages.llm.replicas`` changes a list ``stages`` that was set before it.
    """
    found: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            found.pop(key, None)
            found[key] = value
    return found


def within(key: str, given: Iterable[str]) -> bool:
    """Return whether a dotted key is one of the given ones or inside one: `stages.llm.replicas` is within `stages`."""
    return any(key == one or key.startswith(f"{one}.") for one in given)


def apply(raw: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a copy in which each dotted key has its new value. List entries are named by their ``name`` or number.

    Raises:
        ConfigError: a key leads through a value that is no table, or names an entry that does not exist.
    """
    changed = deepcopy(dict(raw))
    for key, value in flatten(overrides).items():
        _set(changed, key, deepcopy(value), where)
    return changed


def _set(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"{where}: '{key}' is not a dotted key such as 'stages.llm.replicas'")
    at: Any = tables
    for depth, part in enumerate(parts[:-1]):
        at = _entry(at, part, ".".join(parts[:depth]), where) if isinstance(at, list) else at.setdefault(part, {})
        if not isinstance(at, (dict, list)):
            raise ConfigError(f"{where}: '{key}' cannot be set: '{'.'.join(parts[: depth + 1])}' is {at!r}, no table")
    if isinstance(at, list):
        inside = ".".join(parts[:-1])
        _entry(at, parts[-1], inside, where)
        raise ConfigError(f"{where}: '{key}' is an entry; name a key of it, such as '{key}.name'")
    at[parts[-1]] = value


def _entry(entries: list[Any], part: str, inside: str, where: str) -> Any:
    """Return the entry with that name or number."""
    names = {str(one.get("name", at)): one for at, one in enumerate(entries) if isinstance(one, dict)}
    if part in names:
        return names[part]
    if part.isdigit() and int(part) < len(entries):
        return entries[int(part)]
    hint = did_you_mean(part, names, lambda one: f"{inside}.{one}") or f"there are {', '.join(names) or 'none'}"
    raise ConfigError(f"{where}: there is no '{inside}.{part}'; {hint}")


STUDY_KEYS = ("variants", "cases", "tune", "sweep", "search", "repeats")
"""Keys of a file that belong to a study, not to one run."""


@dataclass(frozen=True)
class Source:
    """Content of a scenario file and its location; scenarios are made from it and overrides.

    ``raw``: without the keys of a study. ``folder``: from which it names files.
    """

    raw: Mapping[str, Any]
    where: str
    folder: Path

    def scenario(self, overrides: Mapping[str, Any] | None = None, which: str = "") -> Scenario:
        """Return the scenario with the overrides applied; ``which`` names them in messages.

        Raises:
            ConfigError: as for `load`.
        """
        where = f"{self.where}, {which}" if which else self.where
        return build(apply(self.raw, overrides or {}, where), where, self.folder)


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Return the scenario in a TOML file; keys of a study are ignored.

    Args:
        overrides: values by dotted keys, such as ``{"stages.llm.replicas": 4}``.

    Raises:
        ConfigError: the file cannot be read, or something in it or in the overrides is unknown, of the wrong type, out
            of range, or impossible. One message for all, with file and dotted keys.
    """
    return read_source(path)[0].scenario(overrides)


def read_source(path: Path) -> tuple[Source, dict[str, Any]]:
    """Return the keys of a file for its run, and those for a study.

    Raises:
        ConfigError: it cannot be read, or is not TOML; the message names the line.
    """
    raw = read_toml(path)
    study = {key: raw.pop(key) for key in STUDY_KEYS if key in raw}
    return Source(raw, path.name, path.parent), study


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: it cannot be read, or is not TOML; the message names the line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{path}: values are nested too deeply to be read; no scenario needs that") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path.name}: not valid TOML: {' '.join(str(error).split())}") from None


def build(raw: Mapping[str, Any], where: str, folder: Path) -> Scenario:
    """Return the scenario in a mapping.

    Args:
        where: source of the mapping, for messages.
        folder: folder to which file names are relative.

    Raises:
        ConfigError: as for `load`.
    """
    values, problems = deepcopy(dict(raw)), []
    for key, read in (("policy", _policy), ("orchestration", _orchestration)):
        if key in values:
            try:
                values[key] = read(values[key])
            except ConfigError as error:
                problems.append(str(error))
                del values[key]
    _resolve(values, folder)
    if not {"duration_seconds", "requests"} & values.keys():
        values.update(_length_of_trace(values.get("workload")))
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        problems = [explain_problem(one, Scenario, values) for one in error.errors()] + problems
    else:
        problems += _unknown(scenario)
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems))
    return scenario


def _length_of_trace(workload: Any) -> dict[str, float]:
    """Return the time for which a trace has requests, so that none of them is left out; nothing of other workloads."""
    if not isinstance(workload, Mapping) or workload.get("kind") != "trace":
        return {}
    try:
        options = TraceOptions.model_validate(
            {key: workload[key] for key in TraceOptions.model_fields.keys() & workload.keys()}
        )
        trace = read_trace(Path(options.file))
    except (ConfigError, ValidationError):  # reported with the other problems of the workload
        return {}
    if not options.repeat:
        return {}
    scale = Replay(trace, options).rate * trace.seconds / trace.arrivals if trace.requests else 1.0
    return {"duration_seconds": options.repeat * trace.seconds / scale}


def _policy(options: Any) -> OmniSchedConfig:
    """Read options like vLLM's ``--additional-config``, except for the location in messages."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"'policy' must be a table, got {options!r}")
    try:
        read_options(OmniSchedConfig, options, "policy", group="policy")
        config = load_config({KEY: dict(options)})
        read_options(VideoOptions, config.video, "policy", group="policy.video")
        return config
    except ConfigError as error:
        message = str(error)
        for prefix in ("policy: ", f"additional_config[{KEY!r}]: ", "in 'policy': "):
            message = message.removeprefix(prefix)
        raise ConfigError(message if "'policy." in message else f"[policy]: {message}") from None


def _orchestration(options: Any) -> Any:
    if not isinstance(options, Mapping):
        raise ConfigError(f"'orchestration' must be a table, got {options!r}")
    return read_stage_options(options, "[orchestration]")


def _resolve(values: dict[str, Any], folder: Path) -> None:
    """Make file names relative to the folder of the scenario."""
    stages = [one for one in values.get("stages", ()) if isinstance(one, dict)]
    holders = [("calibration", one) for one in stages]
    holders += [("model", one) for one in stages if str(one.get("model")).endswith(".json")]
    holders += [("file", one) for one in _tables(values.get("workload"))]
    for key, holder in holders:
        if isinstance(named := holder.get(key), str):
            holder[key] = str(folder / named)


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a table and those inside it, as of workloads that consist of others."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _tables(inner)


def _unknown(scenario: Scenario) -> Iterator[str]:
    """Yield names and files that do not exist."""
    yield from _not_in(DEVICES, scenario.cluster.device, "cluster.device", "device")
    yield from _of_video_engines(scenario)
    for stage in scenario.stages:
        model = getattr(stage, "model", None)
        if model is not None:
            yield from _not_in(MODELS, model, f"stages.{stage.name}.model", "model")
        file = getattr(stage, "calibration", None)
        if file is not None and not Path(file).is_file():
            yield (
                f"'stages.{stage.name}.calibration': there is no file {Path(file).name!r} relative to the scenario; "
                "`vllm-omni-sched calibrate` writes one"
            )
    if scenario.orchestration is not None:
        try:
            names = {at: stage.name for at, stage in enumerate(scenario.stages)}
            check_against(scenario.orchestration, names)
            runtime, edges = scenario.orchestration.runtime, [(at, at + 1) for at in range(len(names) - 1)]
            edge_connectors(runtime, runtime.connectors, names, edges)
            if runtime.recovery.act_on:
                yield "[orchestration]: 'runtime.recovery.act_on' is not simulated: remove it"
        except ConfigError as error:
            yield f"[orchestration]: {error}"
    yield from _of_workload(scenario)


def _of_video_engines(scenario: Scenario) -> Iterator[str]:
    """Yield stages with more video engines than the GPUs have."""
    device = scenario.cluster.device
    if device not in DEVICES:
        return
    each = DEVICES[device].nvdec_engines
    for stage in scenario.stages:
        if not isinstance(stage, VideoStage) or stage.decoders != "nvdec":
            continue
        gpus = scenario.cluster.devices_per_node if stage.collaborative else 1
        if stage.per_replica > gpus * each:
            whose = (
                f"a node of {gpus} {device}" if stage.collaborative else f"the {device} that an API server decodes on"
            )
            key = f"stages.{stage.name}.per_replica"
            yield f"'{key}' is {stage.per_replica}, but {whose} has {gpus * each} video engines: lower it"


def _of_workload(scenario: Scenario) -> Iterator[str]:
    workload = scenario.workload
    if missing := list(_not_in(registry.KINDS, workload.kind, "workload.kind", "workload")):
        yield from missing
        return
    options = registry.KINDS[workload.kind]
    rate = options.model_fields.get("rate")
    if rate is not None and rate.is_required() and workload.rate is None:
        yield f"'workload.rate' is missing: mean requests per second of '{workload.kind}'"
        return
    table = workload.table()
    try:
        options.model_validate(table)
        registry.build({"kind": workload.kind, **table})  # names of files are whole
    except ValidationError as error:
        yield from (explain_problem(one, options, table, "workload") for one in error.errors())
    except ConfigError as error:
        yield str(error)
    kinds = set(_kinds({"kind": workload.kind, **workload.options}))
    if "video-clips" in kinds and not any(stage.kind == "video" for stage in scenario.stages):
        yield f"'workload.kind' is '{workload.kind}', but no stage of kind 'video' decodes its videos: add one"


def _kinds(table: Any) -> Iterator[str]:
    """Yield the kinds of a workload and of those inside it."""
    if isinstance(table, Mapping):
        if isinstance(kind := table.get("kind"), str):
            yield kind
        for inner in table.values():
            yield from _kinds(inner)
    elif isinstance(table, list):
        for inner in table:
            yield from _kinds(inner)


def _not_in(names: Collection[str], name: str, key: str, what: str) -> Iterator[str]:
    if name not in names:
        hint = did_you_mean(name, sorted(names)) or f"known: {', '.join(sorted(names))}"
        yield f"'{key}': there is no {what} '{name}'; {hint}"
