"""The YAML with which vLLM-Omni deploys a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dev.omni_cpu.spec import DIFFUSION, PipelineSpec


def write_deploy(spec: PipelineSpec, file: Path) -> Path:
    """Returns the file."""
    file.write_text(yaml.safe_dump(_deploy(spec), sort_keys=False))
    return file


def _deploy(spec: PipelineSpec) -> dict[str, Any]:
    return {
        "pipeline": spec.pipeline,
        "async_chunk": spec.mode == "async_chunk",
        "model_runner": "v1",  # the other needs Triton
        # in one process with the engine core, as vLLM-Omni runs a stage on one GPU, or in one of its own
        "distributed_executor_backend": "mp" if spec.workers else "uni",
        "dtype": "float32",
        "enable_prefix_caching": False,  # to vLLM all prompts of a later stage look alike
        "stages": [_stage(spec, number) for number in range(spec.stages)],
        **({"connectors": {"c": {"name": spec.connector, "extra": dict(spec.extra)}}} if spec.connector else {}),
    } | ({} if spec.scheduling is None else {"omni_sched": dict(spec.scheduling)})


def _stage(spec: PipelineSpec, number: int) -> dict[str, Any]:
    stage: dict[str, Any] = {"stage_id": number, "devices": "0", "enforce_eager": True}
    diffuses = number == DIFFUSION.get(spec.pipeline)
    stage |= {"max_num_seqs": 1, "gpu_memory_utilization": 0.05} if diffuses else _engine(spec)
    if number == spec.replicated % spec.stages and spec.replicas > 1:
        stage |= {"num_replicas": spec.replicas, "devices": ",".join(["0"] * spec.replicas)}
    if diffuses:
        return stage  # its prompts go through the front end
    targets = [one for one in range(spec.stages) if number in spec.sources(one) and one != DIFFUSION.get(spec.pipeline)]
    incoming = {f"from_stage_{source}": "c" for source in spec.sources(number)}
    outgoing = {f"to_stage_{target}": "c" for target in targets}
    if incoming and spec.connector:
        stage["input_connectors"] = incoming
    if outgoing and spec.connector:
        stage["output_connectors"] = outgoing
    return stage


def _engine(spec: PipelineSpec) -> dict[str, Any]:
    return {
        "async_scheduling": False,  # vLLM has none on a CPU, and vLLM-Omni picks its scheduler by this
        "max_num_seqs": spec.max_num_seqs,
        "max_model_len": spec.max_model_len,
        "max_num_batched_tokens": spec.max_model_len,
        "gpu_memory_utilization": 0.05,
        "engine_extras": {"kv_cache_memory_bytes": spec.kv_cache_bytes, "block_size": 32, "seed": 0},
    }
