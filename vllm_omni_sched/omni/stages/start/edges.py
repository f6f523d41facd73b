"""Put the connectors of our options on the edges of vLLM-Omni's transfer config."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import ConfigError, RendezvousError
from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_yaml import edge_connectors
from vllm_omni_sched.connectors.mooncake.store import reach_master
from vllm_omni_sched.connectors.named_routes import resolved_connectors

Edge = tuple[str, str]


def with_our_connectors(config: StageSchedConfig, runtime: Any, transfer: Any) -> Any:
    """Return vLLM-Omni's `OmniTransferConfig` with our connectors in it; `transfer` itself if we have none.

    Args:
        config: our options.
        runtime: vLLM-Omni's `StageRuntime`, before it has started any replica.
        transfer: the transfer config of the deploy YAML; None if it has none.

    Raises:
        ConfigError: a stage, an edge or a connector is unknown, the deploy YAML has another connector on an edge, or a
            stage would have two: vLLM-Omni gives it one for input and output. Or see `resolved_connectors`.
    """
    if not config.runtime.connectors:
        resolved_connectors(config)  # which other options may need
        return transfer
    from vllm_omni.distributed.omni_connectors.utils.config import OmniTransferConfig
    from vllm_omni.engine.stage_runtime import DistStageRuntime

    if isinstance(runtime, DistStageRuntime):
        raise ConfigError(
            "option 'runtime.connectors': a pipeline on several hosts (--stage-id) reads connectors from the deploy "
            "YAML of each host; write them there, and remove these"
        )
    stages = {int(stage.stage_id): stage for stage in metadata(runtime)}
    edges = [
        (int(source), stage_id)
        for stage_id, stage in stages.items()
        for source in stage.engine_input_source or ()
        if int(source) >= 0
    ]
    names = {key: stage.model_stage or "" for key, stage in stages.items()}
    original = transfer.connectors if transfer is not None else {}
    merged = merged_connectors(config, names, edges, original, _all_explicit_edges(runtime._stage_configs))
    _check_reachable(config)
    return OmniTransferConfig(merged, transfer.default_connector if transfer is not None else None)


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
        ConfigError: as for `with_our_connectors`.
    """
    connectors = resolved_connectors(config)
    if not connectors:
        return dict(original)
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

    _check_known(config)
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
    _check_one_per_stage(merged, [(str(start), str(end)) for start, end in edges], ours)
    return merged


def _check_known(config: StageSchedConfig) -> None:
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    known = OmniConnectorFactory.list_registered_connectors()
    for key, connector in config.runtime.connectors.items():
        if connector.name not in known:
            hint = did_you_mean(connector.name, known) or f"known: {', '.join(sorted(known))}"
            raise ConfigError(
                f"option 'runtime.connectors.{key}.name': there is no connector {connector.name!r}; {hint}"
            )


def _check_reachable(config: StageSchedConfig) -> None:
    """Refuse a route through a Mooncake store without a master before any stage has loaded its model for nothing."""
    for connector in resolved_connectors(config).values():
        if connector.mooncake is not None:
            extra, options = connector.mooncake
            try:
                reach_master(options, monotonic_seconds)
            except RendezvousError as error:
                raise ConfigError(
                    f"option '{extra}.master': {error}; or remove the connector if all stages are on one host"
                ) from error


def metadata(runtime: Any) -> list[Any]:
    """Return the metadata of all stages, before any has started."""
    return [_metadata(stage) for stage in runtime._stage_configs]


def _metadata(stage: Any) -> Any:
    from vllm_omni.engine import stage_runtime

    if isinstance(stage, stage_runtime.BaseVllmOmniStageConfig):
        return stage_runtime.extract_stage_metadata_from_omni_stage_config(stage)
    return stage_runtime.extract_legacy_stage_metadata(stage)


def _all_explicit_edges(stages: list[Any]) -> set[Edge]:
    """Return the edges to which the deploy YAML gives connectors instead of leaving them to vLLM-Omni's default."""
    found = set()
    for stage in stages:
        connectors = getattr(stage, "connector_config", None)
        found |= explicit_edges(int(_metadata(stage).stage_id), connectors)
    return found


def explicit_edges(stage_id: int, connectors: Any) -> set[Edge]:
    """Return the edges to which a stage gives connectors by its ``input_connectors`` and ``output_connectors``."""
    own = str(stage_id)
    incoming = getattr(connectors, "input_connectors", None) or {}
    outgoing = getattr(connectors, "output_connectors", None) or {}
    found = {(name.removeprefix("from_stage_"), own) for name in incoming}
    return found | {(own, name.removeprefix("to_stage_")) for name in outgoing}


def _check_one_per_stage(merged: Mapping[Edge, Any], edges: list[Edge], ours: Mapping[Edge, Any]) -> None:
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
