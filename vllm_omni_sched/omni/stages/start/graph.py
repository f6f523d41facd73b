"""Convert vLLM-Omni's pipeline to our graph of stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vllm_omni_sched.graph.stages import GraphError, Stage, StageGraph, StageKind
from vllm_omni_sched.omni.stages.payloads import connector_config
from vllm_omni_sched.omni.stages.start.caches import sends_caches
from vllm_omni_sched.omni.stages.start.edges import metadata


def graph_of(pools: Iterable[Any]) -> StageGraph:
    """Return the graph of running stages.

    Raises:
        GraphError: as for `checked`.
    """
    pools = list(pools)
    graph = checked(_stage(pool.stage_id, pool.stage_client, _kind(pool), pool.num_replicas) for pool in pools)
    return graph.with_chunks([pool.stage_id for pool in pools if _reads_chunks(pool)]) if graph.branches else graph


def _reads_chunks(pool: Any) -> bool:
    """Return whether a running stage gets chunks by the connector of stages that branch."""
    config = connector_config(pool)
    if config is None or not getattr(pool.stage_vllm_config.model_config, "async_chunk", False):
        return False
    return any(target == pool.stage_id for _, target in config["extra"].get("edges", ()))


def graph_of_configs(stage_configs: Iterable[Any]) -> StageGraph:
    """Return the graph of stages before they start.

    Args:
        stage_configs: vLLM-Omni's configs of all stages.

    Raises:
        GraphError: as for `checked`.
    """
    told = [(config, metadata(config)) for config in stage_configs]
    return checked(_stage(int(one.stage_id), one, _kind_of(config, one), _replicas(one)) for config, one in told)


def _replicas(told: Any) -> int:
    return int(getattr(getattr(told, "runtime_cfg", None), "num_replicas", None) or 1)


def _kind_of(config: Any, told: Any) -> StageKind:
    if told.stage_type == "diffusion":
        return StageKind.DIFFUSION
    execution = getattr(getattr(config, "stage_pipeline_config", None), "execution_type", None)
    return StageKind.GENERATION if getattr(execution, "value", "") == "llm_generation" else StageKind.AR


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


def with_chunks(
    graph: StageGraph,
    carried: Collection[tuple[int, int]],
    async_chunk: Collection[int],
    makers: Collection[int] | None = None,
) -> StageGraph:
    """Return stages which are more than a line with those marked that read chunks; a line is returned as it is.

    Args:
        carried: the edges that have a connector; on others, the front end passes on prompts.
        async_chunk: the stages that are in async-chunk mode.
        makers: the stages whose pipeline names a function that makes chunks; None if that is not known.

    Raises:
        GraphError: a stage would wait for chunks that nothing sends.
    """
    if not graph.branches:
        return graph
    reading = set()
    for stage in graph.stages:
        if stage.kind is StageKind.DIFFUSION:
            continue  # it gets its prompt from the front end
        by_connector = [source for source in stage.sources if (source, stage.stage_id) in carried]
        in_mode = stage.stage_id in async_chunk
        for source in by_connector:
            if in_mode is not (source in async_chunk):
                both = f"stage {graph.stage(source)}", f"stage {stage}"
                chunks, whole = both if source in async_chunk else reversed(both)
                raise GraphError(
                    f"stage {stage} reads stage {graph.stage(source)}; {chunks} exchanges chunks (async_chunk: true) "
                    f"and {whole} whole payloads (async_chunk: false): set the same 'async_chunk' for both in the "
                    "deploy YAML"
                )
        if not in_mode or not stage.sources:
            continue
        if by_connector and len(by_connector) < len(stage.sources):
            rest = next(source for source in stage.sources if source not in by_connector)
            raise GraphError(
                f"stage {stage} reads stage {graph.stage(by_connector[0])} in chunks (async_chunk: true), and a prompt "
                f"of stage {graph.stage(rest)}, since the edge {rest}->{stage.stage_id} has no connector: give it the "
                "same connector ('input_connectors' of the deploy YAML, or 'runtime.edges'), or set async_chunk: false"
            )
        sends = any((stage.stage_id, after) in carried for after in graph.successors(stage.stage_id))
        if not by_connector and not sends:
            raise GraphError(
                f"stage {stage} waits for chunks (async_chunk: true), and none of its edges has a connector: give the "
                f"edge {stage.sources[0]}->{stage.stage_id} one ('input_connectors' of the deploy YAML, or "
                "'runtime.edges'), or set async_chunk: false for this stage"
            )
        for source in by_connector:
            if makers is not None and source not in makers:
                raise GraphError(
                    f"stage {stage} reads stage {graph.stage(source)} in chunks (async_chunk: true), but that stage "
                    "has no function that makes chunks ('async_chunk_process_next_stage_input_func' of its pipeline): "
                    "set async_chunk: false in the deploy YAML"
                )
        if by_connector:
            reading.add(stage.stage_id)
    return graph.with_chunks(reading)


def chunk_stages(stage_configs: Iterable[Any]) -> tuple[set[int], set[int] | None]:
    """Return the stages in async-chunk mode, and those whose pipeline names a function that makes chunks.

    The second is None if a config does not tell.

    Args:
        stage_configs: vLLM-Omni's configs of all stages, in the order of their ids.
    """
    stages = list(stage_configs)
    in_mode = {number for number, stage in enumerate(stages) if _in_mode(stage)}
    pipelines = [getattr(stage, "stage_pipeline_config", None) for stage in stages]
    if any(one is None for one in pipelines):
        return in_mode, None
    return in_mode, {number for number, one in enumerate(pipelines) if makes_chunks(one)}


def _in_mode(stage: Any) -> bool:
    for name in ("connector_config", "engine_args"):
        told = getattr(stage, name, None)
        found = told.get("async_chunk") if isinstance(told, Mapping) else getattr(told, "async_chunk", None)
        if found is not None:
            return bool(found)
    return False


def makes_chunks(stage: Any) -> bool:
    """Return whether a stage of vLLM-Omni's `PipelineConfig` names a function that makes chunks of its output."""
    return bool(getattr(stage, "async_chunk_process_next_stage_input_func", None))


def check_one_host(graph: StageGraph, several_hosts: bool) -> None:
    """Check that stages which are more than a line run on one host.

    Raises:
        GraphError: they do not.
    """
    if graph.branches and several_hosts:
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
