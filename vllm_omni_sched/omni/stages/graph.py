"""vLLM-Omni's pipeline as our graph of stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind


def graph_of(pools: Iterable[Any]) -> StageGraph:
    """The graph of stages that run.

    Raises:
        GraphError: a stage reads from one that is not there, or the like.
    """
    return StageGraph.of(_stage(pool) for pool in pools)


def _stage(pool: Any) -> Stage:
    client = pool.stage_client
    sources = getattr(client, "engine_input_source", None)
    if sources is None:
        sources = [pool.stage_id - 1] if pool.stage_id else []
    return Stage(
        stage_id=pool.stage_id,
        name=getattr(client, "model_stage", None) or f"stage {pool.stage_id}",
        kind=_kind(pool, client),
        sources=tuple(int(source) for source in sources if int(source) >= 0),
        final_output=bool(client.final_output),
        modality=getattr(client, "final_output_type", None) or "text",
        replicas=max(pool.num_replicas, 1),
    )


def _kind(pool: Any, client: Any) -> StageKind:
    if client.stage_type == "diffusion":
        return StageKind.DIFFUSION
    scheduler = str(getattr(pool.stage_vllm_config.scheduler_config, "scheduler_cls", None) or "")
    return StageKind.GENERATION if "Generation" in scheduler else StageKind.AR
