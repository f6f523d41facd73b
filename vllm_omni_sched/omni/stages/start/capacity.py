"""Read from vLLM-Omni's configuration how many requests a replica runs at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNBOUNDED = 1 << 30


def max_num_seqs_of(pool: Any, runtime: Any) -> int:
    """Return the `max_num_seqs` of a stage.

    Args:
        pool: the stage.
        runtime: vLLM-Omni's `StageRuntime`. It alone knows the configuration of a diffusion stage; the pool of such a
            stage has no `VllmConfig`.
    """
    scheduler = getattr(pool.stage_vllm_config, "scheduler_config", None)
    found = getattr(scheduler, "max_num_seqs", None)
    if found is None and pool.stage_id < len(configs := getattr(runtime, "_stage_configs", ())):
        config = configs[pool.stage_id]
        given = getattr(config, "diffusion_config", None) or getattr(config, "engine_args", None)
        found = given.get("max_num_seqs") if isinstance(given, Mapping) else getattr(given, "max_num_seqs", None)
        found = found or (1 if pool.stage_type == "diffusion" else None)  # vLLM-Omni's default
    return int(found or UNBOUNDED)
