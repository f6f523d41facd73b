"""Convert vLLM-Omni's pipeline to our graph of stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_omni_sched.graph.stages import GraphError, Stage, StageGraph, StageKind


def graph_of(pools: Iterable[Any]) -> StageGraph:
    """Return the graph of running stages.

    Raises:
        GraphError: as for `line_of`.
    """
    return line_of(_stage(pool.stage_id, pool.stage_client, _kind(pool), pool.num_replicas) for pool in pools)


def graph_of_metadata(stages: Iterable[Any]) -> StageGraph:
    """Return the graph of stages before they start, from vLLM-Omni's `StageMetadata`, which does not mark generation.

    Raises:
        GraphError: as for `line_of`.
    """
    return line_of(
        _stage(int(one.stage_id), one, StageKind.DIFFUSION if one.stage_type == "diffusion" else StageKind.AR, 1)
        for one in stages
    )


def graph_of_pipeline(pipeline: Any, replicas: Mapping[int, int]) -> StageGraph:
    """Return the graph of a pipeline that is not started, from vLLM-Omni's `PipelineConfig`.

    Args:
        replicas: replicas of each stage by its id; 1 for missing ones.

    Raises:
        GraphError: as for `line_of`.
    """
    kinds = {"llm_generation": StageKind.GENERATION, "diffusion": StageKind.DIFFUSION}
    return line_of(
        Stage(
            stage_id=one.stage_id,
            name=one.model_stage or f"stage {one.stage_id}",
            kind=kinds.get(str(one.execution_type.value), StageKind.AR),
            sources=tuple(one.input_sources) or ((one.stage_id - 1,) if one.stage_id else ()),
            final_output=bool(one.final_output),
            modality=one.final_output_type or "text",
            replicas=max(replicas.get(one.stage_id, 1), 1),
        )
        for one in pipeline.stages
    )


def line_of(stages: Iterable[Stage]) -> StageGraph:
    """Return the graph of stages that vLLM-Omni 0.30 can run.

    It gives a request to stage 0, and the output of a stage to the stage with the next id.

    Raises:
        GraphError: a stage reads from one that does not exist, nothing leads to it, stages wait for each other, or they
            are not a line in the order of their ids.
    """
    graph = StageGraph.of(stages, entries=[0])
    for before, stage in zip(graph.stages, graph.stages[1:], strict=False):
        if stage.sources != (before.stage_id,):
            reads = ", ".join(map(str, stage.sources)) or "none"
            raise GraphError(
                f"stage {stage} reads {reads}, but vLLM-Omni gives it the output of stage {before} only: "
                "stages must be a line, each reading the one before; or turn the stage scheduler off"
            )
    return graph


def _stage(stage_id: int, told: Any, kind: StageKind, replicas: int) -> Stage:
    """Return our stage; ``told``: a client or the metadata of the stage."""
    # No source is vLLM-Omni's legacy default, with which it passes on the output of the stage before.
    sources = getattr(told, "engine_input_source", None) or ([stage_id - 1] if stage_id else [])
    return Stage(
        stage_id=stage_id,
        name=getattr(told, "model_stage", None) or f"stage {stage_id}",
        kind=kind,
        sources=tuple(int(source) for source in sources if int(source) >= 0),
        final_output=bool(told.final_output),
        modality=getattr(told, "final_output_type", None) or "text",
        replicas=max(replicas, 1),
    )


def _kind(pool: Any) -> StageKind:
    if pool.stage_client.stage_type == "diffusion":
        return StageKind.DIFFUSION
    scheduler = str(getattr(pool.stage_vllm_config.scheduler_config, "scheduler_cls", None) or "")
    return StageKind.GENERATION if "Generation" in scheduler else StageKind.AR
