"""Put the connector for stages that branch around the one of vLLM-Omni's transfer config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.graph.stages import StageGraph
from vllm_omni_sched.omni.stages.start.edges import Edge

CONNECTOR = "OmniBranchConnector"


def with_branch_connector(graph: StageGraph, transfer: Any) -> Any:
    """Return vLLM-Omni's `OmniTransferConfig` with the connector that sends an output to several stages.

    Args:
        graph: the stages, with those marked that read chunks.
        transfer: the transfer config with all connectors; returned as it is if the stages are a line.

    Raises:
        ConfigError: the edges have different connectors, one that needs the address of the sender, or one on an edge
            that the stages do not have.
    """
    if not graph.branches or transfer is None or not transfer.connectors:
        return transfer
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec, OmniTransferConfig

    carried = carried_edges(graph, transfer.connectors)
    spec = transfer.connectors[carried[0]]
    extra = {"connector": spec.name, "extra": dict(spec.extra or {}), "edges": [[int(s), int(t)] for s, t in carried]}
    if graph.chunked:
        extra["chunked"] = [stage.stage_id for stage in graph.stages if stage.reads_chunks]
    return OmniTransferConfig(
        {edge: ConnectorSpec(CONNECTOR, dict(extra)) for edge in carried}, transfer.default_connector
    )


def carried_edges(graph: StageGraph, connectors: Mapping[Edge, Any]) -> list[Edge]:
    """Return the edges of stages that branch which have a connector, in order.

    Raises:
        ConfigError: as for `with_branch_connector`.
    """
    edges = [(str(source), str(stage.stage_id)) for stage in graph.stages for source in stage.sources]
    for edge in connectors:
        if edge not in edges:
            raise ConfigError(
                f"the deploy YAML has a connector on the edge {'->'.join(edge)}, but stage {edge[1]} does not read "
                f"stage {edge[0]}: edges are {', '.join('->'.join(one) for one in edges)}"
            )
    carried = [edge for edge in edges if edge in connectors]
    spec = connectors[carried[0]]
    for edge in carried:
        other = connectors[edge]
        if other != spec:
            raise ConfigError(
                f"stages branch, and then all edges have the same connector; {'->'.join(carried[0])} has {spec.name} "
                f"{spec.extra} and {'->'.join(edge)} {other.name} {other.extra}: give them the same"
            )
    if spec.name in _needs_address():
        raise ConfigError(
            f"stages branch, and {spec.name} receives from one sender, whose address it needs: use another connector, "
            "such as OmniAutoConnector"
        )
    return carried


def _needs_address() -> frozenset[str]:
    from vllm_omni.engine.stage_init_utils import TRANSFER_ENGINE_CONNECTOR_NAMES

    return frozenset(TRANSFER_ENGINE_CONNECTOR_NAMES)
