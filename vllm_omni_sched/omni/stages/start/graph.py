"""Convert vLLM-Omni's pipeline to our graph of stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_omni_sched.graph.stages import GraphError, Stage, StageGraph, StageKind
from vllm_omni_sched.omni.stages.start.caches import sends_caches


def graph_of(pools: Iterable[Any]) -> StageGraph:
    """Return the graph of running stages.

    Raises:
        GraphError: as for `checked`.
    """
    return checked(_stage(pool.stage_id, pool.stage_client, _kind(pool), pool.num_replicas) for pool in pools)


def graph_of_metadata(stages: Iterable[Any]) -> StageGraph:
    """Return the graph of stages before they start, from vLLM-Omni's `StageMetadata`, which does not mark generation.

    Raises:
        GraphError: as for `checked`.
    """
    return checked(
        _stage(int(one.stage_id), one, StageKind.DIFFUSION if one.stage_type == "diffusion" else StageKind.AR, 1)
        for one in stages
    )


def graph_of_pipeline(pipeline: Any, replicas: Mapping[int, int]) -> StageGraph:
    """Return the graph of a pipeline that is not started, from vLLM-Omni's `PipelineConfig`.

    Args:
        replicas: replicas of each stage by its id; 1 for missing ones.

    Raises:
        GraphError: as for `checked`.
    """
    kinds = {"llm_generation": StageKind.GENERATION, "diffusion": StageKind.DIFFUSION}
    return checked(
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


def checked(stages: Iterable[Stage]) -> StageGraph:
    """Return the graph of stages, in which requests enter at stage 0 and each stage reads ones with smaller ids.

    Raises:
        GraphError: a stage reads from one that does not exist, nothing leads to it, stages wait for each other, or one
            reads a stage with a larger id.
    """
    graph = StageGraph.of(stages, entries=[0])
    for stage in graph.stages:
        for source in stage.sources:
            if source > stage.stage_id:
                raise GraphError(
                    f"stage {stage} reads stage {graph.stage(source)}, which has a larger id: vLLM-Omni passes "
                    "requests on in the order of the ids; number the stages so that each reads ones with smaller ids"
                )
    return graph


def check_branches(graph: StageGraph, async_chunk: bool) -> None:
    """Check that stages which are more than a line exchange whole payloads.

    Raises:
        GraphError: they exchange chunks.
    """
    if not (graph.branches and async_chunk):
        return
    for before, stage in zip(graph.stages, graph.stages[1:], strict=False):
        if stage.sources != (before.stage_id,):
            reads = ", ".join(map(str, stage.sources))
            raise GraphError(
                f"stage {stage} reads {reads}, and with async_chunk: true vLLM-Omni sends the chunks of a stage to "
                f"the one with the next id only, here those of stage {before}: set async_chunk: false in the deploy "
                "YAML, or turn the stage scheduler off"
            )


def check_one_host(graph: StageGraph, runtime: Any) -> None:
    """Check that stages which are more than a line run on one host.

    Raises:
        GraphError: they do not.
    """
    from vllm_omni.engine.stage_runtime import DistStageRuntime

    if graph.branches and isinstance(runtime, DistStageRuntime):
        raise GraphError("stages branch, and run on several hosts (--stage-id): only a line of stages can do that")


def check_handoffs(graph: StageGraph, pools: Iterable[Any], pd_config: Any) -> None:
    """Check that stages which are more than a line pass on payloads or prompts, and no KV caches.

    Raises:
        GraphError: they pass on KV caches.
    """
    if graph.branches and (pd_config is not None or sends_caches(pools)):
        raise GraphError(
            "stages branch, and one sends its KV cache to the next one, which is possible in a line only: pass on "
            "payloads instead, or turn the stage scheduler off"
        )


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
