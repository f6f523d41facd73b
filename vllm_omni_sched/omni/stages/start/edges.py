"""Put the connectors of our options on the edges of vLLM-Omni's transfer config."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import ConfigError, RendezvousError
from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.config.places import check_folder
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_yaml import edge_connectors
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.auto import ForeignOptions
from vllm_omni_sched.connectors.disk import DiskOptions
from vllm_omni_sched.connectors.mooncake import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.store import load_library, reach_master
from vllm_omni_sched.connectors.named_routes import resolved_connectors

Edge = tuple[str, str]


def merged_connectors(
    config: StageSchedConfig,
    names: Mapping[int, str],
    edges: Collection[tuple[int, int]],
    original: Mapping[Edge, Any],
    written: Collection[Edge],
) -> dict[Edge, Any]:
    """Return the connector of each edge: vLLM-Omni's `ConnectorSpec`, by the ids of both stages as text.

    Args:
        config: our options.
        names: of the stages, by id; "" for none.
        edges: edges of the pipeline, by the ids of their stages.
        original: connectors of the deploy YAML, with those that vLLM-Omni has filled in.
        written: edges to which the deploy YAML itself gives a connector.

    Raises:
        ConfigError: a stage or an edge is unknown, the deploy YAML has another connector on an edge, or a stage would
            have two: vLLM-Omni gives it one for input and output. Or see `resolved_connectors`.
    """
    connectors = resolved_connectors(config)
    if not connectors:
        return dict(original)
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

    ours: dict[Edge, Any] = {
        (str(start), str(end)): ConnectorSpec(connectors[name].name, dict(connectors[name].extra))
        for (start, end), name in edge_connectors(config.runtime, connectors, names, edges).items()
    }
    for edge, spec in ours.items():
        if edge in written and edge in original and original[edge] != spec:
            raise ConfigError(
                f"the deploy YAML has {original[edge].name} {original[edge].extra} on the edge {'->'.join(edge)}, and "
                f"'runtime.connectors' of the stage scheduler {spec.name} {spec.extra}: remove one"
            )
    merged = {**original, **ours}
    check_one_per_stage(merged, [(str(start), str(end)) for start, end in edges], ours)
    return merged


def check_connectors(config: StageSchedConfig) -> None:
    """Check the connectors of our options as far as that needs no pipeline.

    Raises:
        ConfigError: there is no such connector, its options are wrong or cannot work on this host, or a stage would
            have two.
    """
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    known = OmniConnectorFactory.list_registered_connectors()
    for key, connector in config.runtime.connectors.items():
        _check_known(f"runtime.connectors.{key}.name", connector.name, known)
    connectors = resolved_connectors(config)
    for at, options in (part for one in connectors.values() for part in one.parts()):
        if isinstance(options, ArenaOptions | DiskOptions):
            check_folder(f"{at}.directory", options.directory)
        elif isinstance(options, ForeignOptions):
            _check_known(f"{at}.name", options.name, known)
        elif isinstance(options, MooncakeOptions):
            load_library()
    named = {edge: connectors[name] for edge, name in config.runtime.edges.items()}
    labels = {(start.strip(), end.strip()): one for edge, one in named.items() for start, end in [edge.split("->", 1)]}
    check_one_per_stage(labels, list(labels), labels)


def _check_known(option: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known) or f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"option {option!r}: there is no connector {name!r}; {hint}")


def check_reachable(config: StageSchedConfig) -> None:
    """Check that the master of a Mooncake store answers, before a stage has loaded its model for nothing.

    Raises:
        ConfigError: it does not.
    """
    for at, options in (part for one in resolved_connectors(config).values() for part in one.parts()):
        if isinstance(options, MooncakeOptions):
            try:
                reach_master(options, monotonic_seconds)
            except RendezvousError as error:
                raise ConfigError(
                    f"option '{at}.master': {error}; or remove the connector if all stages are on one host"
                ) from error


def metadata(stage: Any) -> Any:
    """Return vLLM-Omni's `StageMetadata` of a stage that is configured and not started yet."""
    from vllm_omni.engine import stage_runtime

    if isinstance(stage, stage_runtime.BaseVllmOmniStageConfig):
        return stage_runtime.extract_stage_metadata_from_omni_stage_config(stage)
    return stage_runtime.extract_legacy_stage_metadata(stage)


def explicit_edges(stages: Iterable[Any]) -> set[Edge]:
    """Return the edges to which the deploy YAML gives connectors instead of leaving them to vLLM-Omni's default."""
    found: set[Edge] = set()
    for stage in stages:
        own, connectors = str(metadata(stage).stage_id), getattr(stage, "connector_config", None)
        incoming = getattr(connectors, "input_connectors", None) or {}
        outgoing = getattr(connectors, "output_connectors", None) or {}
        found |= {(name.removeprefix("from_stage_"), own) for name in incoming}
        found |= {(own, name.removeprefix("to_stage_")) for name in outgoing}
    return found


def check_one_per_stage(merged: Mapping[Edge, Any], edges: list[Edge], ours: Mapping[Edge, Any]) -> None:
    """Check that a stage has one connector for input and output, as vLLM-Omni requires."""
    for before in edges:
        for after in edges:
            if before[1] != after[0] or not {before, after} & ours.keys():
                continue
            if merged.get(before) != merged.get(after):
                raise ConfigError(
                    f"option 'runtime.edges': stage {after[0]} has one connector for input and output, "
                    f"so the edges {'->'.join(before)} and {'->'.join(after)} must have the same; name one on both, or "
                    "remove 'edges', so that each message takes the connector that suits it"
                )
