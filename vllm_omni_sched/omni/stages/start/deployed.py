"""Resolve a deploy YAML like vLLM-Omni, without starting anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_yaml import check_against, file_named
from vllm_omni_sched.graph.stages import Stage, StageGraph
from vllm_omni_sched.omni.stages.placement.initial_placement import Suggestion, assign_initial_devices, suggest_devices
from vllm_omni_sched.omni.stages.start.branch_edges import carried_edges
from vllm_omni_sched.omni.stages.start.edges import Edge, explicit_edges, merged_connectors
from vllm_omni_sched.omni.stages.start.graph import graph_of_pipeline, makes_chunks, with_chunks


@dataclass(frozen=True)
class Deployed:
    """Describes a pipeline as the deploy YAML starts it.

    ``connectors``: vLLM-Omni's `ConnectorSpec` of each edge, by the ids of both stages as text.
    ``ours``: those of them that our options set.
    ``max_num_seqs``, ``devices``: of stages, by id; devices are those of the first plan if our options place the
    stages.

    ``suggestion``: devices and degrees of tensor parallelism that would be better; None if no stage may be placed.

    Missing values have vLLM-Omni's default.
    """

    graph: StageGraph
    async_chunk: bool
    connectors: Mapping[Edge, Any]
    ours: frozenset[Edge]
    max_num_seqs: Mapping[int, int]
    devices: Mapping[int, str]
    suggestion: Suggestion | None = None

    @property
    def chunked(self) -> bool:
        """Return whether stages exchange chunks."""
        return self.async_chunk and (self.graph.chunked or not self.graph.branches)


def deployed(deploy_yaml: Path, model: str | None, config: StageSchedConfig) -> Deployed | None:
    """Return the pipeline that a deploy YAML starts, checked against our options as at the start of the server.

    Args:
        deploy_yaml: vLLM-Omni's.
        model: the served model, which determines the pipeline if the deploy YAML names none.
        config: our options in that file.

    Returns:
        None if the file names no pipeline and no `model` is given.

    Raises:
        ConfigError: vLLM-Omni cannot read the file or knows no such pipeline, the stages cannot be scheduled, or a
            stage, an edge or a connector of our options is unknown or contradicts the file. The message names the file.
    """
    from vllm.plugins import load_general_plugins
    from vllm_omni.config.stage_config import load_deploy_config, resolve_deploy_yaml, resolve_stage_async_chunk
    from vllm_omni.distributed.omni_connectors import load_omni_transfer_config
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()  # they register pipelines and connectors
    load_general_plugins()
    try:
        deploy = load_deploy_config(deploy_yaml)
        transfer = load_omni_transfer_config(config_dict=resolve_deploy_yaml(deploy_yaml))
        pipeline = _pipeline(deploy.pipeline, model, deploy_yaml)
    except Exception as error:  # noqa: BLE001 - whatever vLLM-Omni raises is what would stop its server
        raise ConfigError(f"{deploy_yaml}: vLLM-Omni refuses it: {type(error).__name__}: {error}") from None
    if pipeline is None:
        return None
    stages = {int(stage.stage_id): stage for stage in deploy.stages}
    original = dict(transfer.connectors) if transfer is not None else {}
    with file_named(deploy_yaml, os.environ):
        graph = graph_of_pipeline(pipeline, {key: int(stage.num_replicas) for key, stage in stages.items()})
        names = {stage.stage_id: stage.name for stage in graph.stages}
        check_against(config, names)
        edges = [(source, stage.stage_id) for stage in graph.stages for source in stage.sources]
        written = {edge for key, stage in stages.items() for edge in explicit_edges(key, stage)}
        connectors = merged_connectors(config, names, edges, original, written)
        if graph.branches and connectors:
            carried_edges(graph, connectors)
        graph = with_chunks(
            graph,
            {(int(source), int(target)) for source, target in connectors},
            {stage.stage_id for stage in graph.stages if resolve_stage_async_chunk(deploy, stages.get(stage.stage_id))},
            {stage.stage_id for stage in pipeline.stages if makes_chunks(stage)},
        )
        placed = [SimpleNamespace(model_stage=one.name, runtime_config=_runtime(stages, one)) for one in graph.stages]
        suggestion = suggest_devices(config.graph.partition, placed)
        if config.graph.partition.enabled:
            _assign(config, placed, suggestion)
    return Deployed(
        graph,
        bool(deploy.async_chunk),
        connectors,
        frozenset(edge for edge, spec in connectors.items() if original.get(edge) is not spec),
        {key: stage.max_num_seqs for key, stage in stages.items() if stage.max_num_seqs is not None},
        {number: one.runtime_config.devices for number, one in enumerate(placed) if one.runtime_config.devices},
        suggestion,
    )


def _assign(config: StageSchedConfig, placed: list[Any], suggestion: Suggestion | None) -> None:
    """Assign devices as at the start of the server; if no plan fits, name the suggested one that does."""
    try:
        assign_initial_devices(config.graph.partition, placed)
    except ConfigError as error:
        if config.graph.partition.resize_running or suggestion is None or not suggestion.stages:
            raise
        raise ConfigError(f"{error}; or split a stage in the deploy YAML: stages {suggestion.stages}") from None


def _runtime(stages: Mapping[int, Any], stage: Stage) -> SimpleNamespace:
    """Return the devices and replicas of a stage in the form of vLLM-Omni's stage config."""
    devices = stages[stage.stage_id].devices if stage.stage_id in stages else None
    return SimpleNamespace(devices=devices, num_replicas=stage.replicas)


def _pipeline(name: str | None, model: str | None, deploy_yaml: Path) -> Any:
    """Return vLLM-Omni's `PipelineConfig`; None if neither the file nor a model determines it."""
    from vllm_omni.config.config_factory import StageConfigFactory
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, resolve_pipeline_config

    if model is not None:
        found = StageConfigFactory.get_pipeline_config(
            model, trust_remote_code=False, deploy_config_path=str(deploy_yaml)
        )
        if found is None:
            raise ValueError(f"there is no pipeline for the model {model!r}")
        return found
    if name is None:
        return None
    if name not in OMNI_PIPELINES:
        raise ValueError(f"there is no pipeline {name!r}; it has {', '.join(sorted(OMNI_PIPELINES))}")
    return resolve_pipeline_config(name)
