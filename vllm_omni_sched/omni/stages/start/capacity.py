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
        found = max_num_seqs_in(configs[pool.stage_id])
        found = found or (1 if pool.stage_type == "diffusion" else None)  # vLLM-Omni's default
    return int(found or UNBOUNDED)


def max_num_seqs_in(config: Any) -> int | None:
    """Return the `max_num_seqs` that the deploy YAML gives a stage; None for vLLM-Omni's default.

    Args:
        config: vLLM-Omni's config of the stage.
    """
    for name in ("diffusion_config", "engine_args", "scheduler_config"):
        given = getattr(config, name, None)
        found = given.get("max_num_seqs") if isinstance(given, Mapping) else getattr(given, "max_num_seqs", None)
        if found is not None:
            return int(found)
    return None
