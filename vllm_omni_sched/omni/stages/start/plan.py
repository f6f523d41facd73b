"""Check a pipeline before any of its stages starts, and choose its connectors.

``doctor`` makes the same checks by the same functions. It prints all problems; a start ends with the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_omni_sched.config.checks import Check
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.places import check_file
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_yaml import check_against
from vllm_omni_sched.graph.stages import StageGraph
from vllm_omni_sched.monitor.forecast.models import require
from vllm_omni_sched.omni.stages.start.branch_edges import with_branch_connector
from vllm_omni_sched.omni.stages.start.capacity import max_num_seqs_in
from vllm_omni_sched.omni.stages.start.edges import (
    Edge,
    check_connectors,
    explicit_edges,
    merged_connectors,
)
from vllm_omni_sched.omni.stages.start.graph import check_one_host, chunk_stages, graph_of_configs, with_chunks


def option_checks(config: StageSchedConfig) -> Iterator[Check]:
    """Yield the checks of options that need no pipeline."""
    watching = config.monitoring
    yield partial(check_connectors, config)
    for option, path in (
        ("monitoring.journal.path", watching.journal.path),
        ("monitoring.forecast.history_path", watching.forecast.history_path),
    ):
        if path is not None:
            yield partial(check_file, option, path)
    if watching.forecast.enabled:
        yield partial(require, "statsmodels.tsa.seasonal")


@dataclass(frozen=True)
class StagePlan:
    """Describes a pipeline as it starts.

    ``transfer``: vLLM-Omni's `OmniTransferConfig` with the connectors of all edges; None without any. ``connectors``:
    the same before branches are wrapped. ``ours``: the edges whose connector our options set.
    """

    graph: StageGraph
    transfer: Any
    connectors: dict[Edge, Any]
    ours: frozenset[Edge]


def plan_stages(
    config: StageSchedConfig, stage_configs: Sequence[Any], transfer: Any, *, several_hosts: bool = False
) -> StagePlan:
    """Return the plan of a pipeline.

    Args:
        config: our options.
        stage_configs: vLLM-Omni's configs of all stages, in the order of their ids.
        transfer: the `OmniTransferConfig` of the deploy YAML; None if it has none.
        several_hosts: whether each host starts its own stages (``--stage-id``).

    Raises:
        ConfigError: the stages cannot be scheduled, or a stage, an edge or a connector of our options is unknown or
            contradicts the deploy YAML.
    """
    graph = graph_of_configs(stage_configs)
    check_one_host(graph, several_hosts)
    names = {stage.stage_id: stage.name for stage in graph.stages}
    check_against(config, names)
    _check_limits(config, graph, stage_configs)
    original = dict(getattr(transfer, "connectors", None) or {})
    connectors = original
    if config.runtime.connectors:
        if several_hosts:
            raise ConfigError(
                "option 'runtime.connectors': a pipeline on several hosts (--stage-id) reads connectors from the "
                "deploy YAML of each host; write them there, and remove these"
            )
        from vllm_omni.distributed.omni_connectors.utils.config import OmniTransferConfig

        edges = [(source, stage.stage_id) for stage in graph.stages for source in stage.sources]
        connectors = merged_connectors(config, names, edges, original, explicit_edges(stage_configs))
        transfer = OmniTransferConfig(connectors, transfer.default_connector if transfer is not None else None)
    carried = {(int(source), int(target)) for source, target in connectors}
    graph = with_chunks(graph, carried, *chunk_stages(stage_configs))
    ours = frozenset(edge for edge, spec in connectors.items() if original.get(edge) is not spec)
    return StagePlan(graph, with_branch_connector(graph, transfer), connectors, ours)


def _check_limits(config: StageSchedConfig, graph: StageGraph, stage_configs: Sequence[Any]) -> None:
    for stage in graph.stages:
        least = config.batching.of_stage(stage.stage_id, stage.name).min_batch_size
        most = max_num_seqs_in(stage_configs[stage.stage_id])
        if most is not None and least > most:
            own = next((key for key in (str(stage.stage_id), stage.name) if key in config.batching.stages), None)
            option = "batching.min_batch_size" if own is None else f"batching.stages.{own}.min_batch_size"
            raise ConfigError(
                f"option {option!r} ({least}) must not be above 'max_num_seqs' of stage {stage} in the deploy YAML "
                f"({most}): lower the one, or raise the other"
            )
