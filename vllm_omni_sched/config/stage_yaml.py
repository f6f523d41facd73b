"""Read the options of `config.stage_options` once at start-up.

They are the key ``omni_sched`` of vLLM-Omni's deploy YAML (which ignores unknown keys): a mapping, or the
path of a YAML file of its own, relative to the deploy YAML. Or the environment variable `VARIABLE` names that file.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, ResolvedOption, explain, is_nearly_ours, read_yaml
from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.config.stage_options import RuntimeOptions, StageSchedConfig
from vllm_omni_sched.config.stage_options.batching import ALIASES, StageBatchOptions

VARIABLE = "VLLM_OMNI_SCHED_STAGES"


def load_stage_config(deploy_yaml: Path | None, environ: Mapping[str, str]) -> StageSchedConfig | None:
    """Return the options of the deploy YAML or the environment; None if neither has any, and nothing of ours runs.

    Args:
        deploy_yaml: vLLM-Omni's, if there is one; as in vLLM-Omni, keys that it lacks come from its ``base_config``.
        environ: like `os.environ`.

    Raises:
        ConfigError: both have options, a file cannot be read, or an option is unknown, of the wrong type, out of range
            or contradicts another. The message names the file, the key with its path, the value and the fix.
    """
    found = _find(deploy_yaml, environ)
    return read_stage_options(*found) if found is not None else None


@contextmanager
def file_named(deploy_yaml: Path | None, environ: Mapping[str, str]) -> Iterator[None]:
    """Add the file of the options to a `ConfigError` of the block, or of the function that it decorates.

    Arguments as for `load_stage_config`.
    """
    try:
        yield
    except ConfigError as error:
        found = _find(deploy_yaml, environ)
        raise type(error)(f"{found[1]}: {error}" if found is not None else str(error)) from None


def _find(deploy_yaml: Path | None, environ: Mapping[str, str]) -> tuple[Any, str] | None:
    """Return the options and the file that holds them, None if there are none."""
    file = environ.get(VARIABLE) or None
    found = _in_deploy(deploy_yaml) if deploy_yaml is not None else None
    if found is None:
        return (read_yaml(file, VARIABLE), file) if file else None
    if file:
        raise ConfigError(f"both {found[1]} and {VARIABLE}={file!r} give options of the stage scheduler: remove one")
    return found


def read_stage_options(options: Any, where: str) -> StageSchedConfig:
    """Return the options that a mapping holds; `where` names its source in messages.

    Raises:
        ConfigError: as for `load_stage_config`.
    """
    if not isinstance(options, Mapping):
        kind = type(options).__name__
        raise ConfigError(f"{where} must be a mapping of options or the path of a YAML file, got {kind}")
    try:
        return StageSchedConfig.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_as_written(e, options) for e in error.errors())) from None


def resolved_stage_options(config: StageSchedConfig) -> list[ResolvedOption]:
    """Return all options by their paths, with the values that they have in a pipeline.

    Where a default follows from other options, the resulting value is given (``runtime.stall_seconds``). Options that
    ``batching.stages`` does not set are left out: `BatchingOptions.of_stage` has them.
    """
    follow = {
        "runtime.stall_seconds": config.runtime.stalls_after_seconds,
        "graph.priority.client_classes": config.graph.priority.clients_may_name,
    }
    return [replace(one, value=follow.get(one.name, one.value)) for one in _flat(config, "", given=True)]


def _flat(options: BaseModel, prefix: str, given: bool) -> Iterator[ResolvedOption]:
    """Yield the options of a model and of its nested models; ``given``: the operator has written the model itself."""
    for name in type(options).model_fields:
        value, path, own = getattr(options, name), prefix + name, given and name in options.model_fields_set
        held = value if isinstance(value, dict) else {}
        if isinstance(value, BaseModel):
            yield from _flat(value, f"{path}.", own)
        elif held and all(isinstance(one, BaseModel) for one in held.values()):
            for key, one in held.items():
                yield from _flat(one, f"{path}.{key}.", own)
        elif value is not None or not isinstance(options, StageBatchOptions):
            yield ResolvedOption(path, value.value if isinstance(value, Enum) else value, own)


def check_against(config: StageSchedConfig, stage_names: Mapping[int, str]) -> None:
    """Refuse options of stages that the graph does not have.

    Args:
        stage_names: name of each stage by its id; "" for none.

    Raises:
        ConfigError: a stage is unknown, or is given both by its name and by its id.
    """
    ids = _ids(stage_names)
    for option, given in (
        ("batching.stages", config.batching.stages),
        ("graph.partition.profiles", config.graph.partition.profiles),
    ):
        _check_stages(option, given, ids)
    for edge in config.graph.partition.payload_bytes:
        for end in edge.split("->", 1):
            option = f"option 'graph.partition.payload_bytes.{edge}'"
            _stage_id(ids, end.strip(), f"{option}: there is no stage {end.strip()!r}")


def _check_stages(option: str, given: Iterable[str], ids: Mapping[str, int]) -> None:
    seen: dict[int, str] = {}
    for key in given:
        _stage_id(ids, key, f"option '{option}.{key}': there is no such stage")
        if (other := seen.setdefault(ids[key], key)) != key:
            raise ConfigError(f"options '{option}.{other}' and '{option}.{key}' are for the same stage: merge them")


def edge_connectors(
    options: RuntimeOptions,
    connectors: Iterable[str],
    stage_names: Mapping[int, str],
    edges: Collection[tuple[int, int]],
) -> dict[tuple[int, int], str]:
    """Return the name of each edge's connector, by the ids of its stages.

    Args:
        connectors: names of the connectors; without ``edges`` in the options there is one, for all edges.
        stage_names: as for `check_against`.
        edges: the edges of the graph.

    Raises:
        ConfigError: a stage or an edge is unknown, or an edge is given twice.
    """
    if not options.edges:
        return {edge: name for name in connectors for edge in edges}
    ids = _ids(stage_names)
    found: dict[tuple[int, int], str] = {}
    for key, name in options.edges.items():
        start, end = (
            _stage_id(ids, part.strip(), f"option 'runtime.edges.{key}': there is no stage {part.strip()!r}")
            for part in key.split("->", 1)
        )
        if (start, end) not in edges:
            known = ", ".join(f"{one}->{other}" for one, other in edges)
            raise ConfigError(f"option 'runtime.edges.{key}': the pipeline has no such edge; it has {known or 'none'}")
        if (start, end) in found:
            raise ConfigError(f"option 'runtime.edges.{key}': that edge is given twice, by name and by id: keep one")
        found[start, end] = name
    return found


def _ids(stage_names: Mapping[int, str]) -> dict[str, int]:
    """Return the ids of stages by all names that they may have."""
    ids = {str(stage_id): stage_id for stage_id in stage_names}
    return ids | {name: stage_id for stage_id, name in stage_names.items() if name and name not in ids}


def _stage_id(ids: Mapping[str, int], key: str, problem: str) -> int:
    if key in ids:
        return ids[key]
    hint = did_you_mean(key, ids) or f"known stages: {', '.join(ids)}"
    raise ConfigError(f"{problem}; {hint}")


def _in_deploy(path: Path, inherited_by: tuple[Path, ...] = ()) -> tuple[Any, str] | None:
    """Return the options under our key in the deploy YAML or in one that it is based on, and their source."""
    if path in inherited_by:
        raise ConfigError(f"{path}: 'base_config' refers back to this file; remove it from one of the files")
    named_by = "the deploy YAML" if not inherited_by else f"{inherited_by[-1]}: 'base_config'"
    deploy = read_yaml(str(path), named_by, only=KEY)
    if not isinstance(deploy, Mapping):
        return None  # vLLM-Omni will report it
    for key in deploy:
        if is_nearly_ours(key):
            raise ConfigError(f"{path}: the key {key!r} is unknown; did you mean {KEY!r}?")
    if KEY not in deploy:
        base = deploy.get("base_config")
        return _in_deploy(path.parent / base, (*inherited_by, path)) if isinstance(base, str) else None
    options, where = deploy[KEY], f"{path}: {KEY!r}"
    if options is False:  # off, although a base file has it on
        return None
    if options is None:
        return {}, where
    if isinstance(options, str):
        file = str(path.parent / options)
        return read_yaml(file, where), file
    return options, where


def _as_written(error: Any, options: Mapping[str, Any]) -> str:
    """Return one sentence for a validation error, with the key as the operator has written it."""
    *sections, name = map(str, error["loc"]) if error["loc"] else ("",)
    inside: Any = options
    for section in sections:
        inside = inside.get(section) if isinstance(inside, Mapping) else None
    names = [name, *(alias for alias, of in ALIASES.items() if of == name)]
    known = [".".join([*sections, one]) for one in names if isinstance(inside, Mapping) and one in inside]
    known += [one for one in names if one in options]
    path = ".".join([*sections, name])
    said = explain(error, StageSchedConfig)
    return said.replace(f"'{path}'", f"'{known[0]}'") if known else said
