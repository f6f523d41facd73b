"""A replica of a stage, started again in the place of one that has died."""

from __future__ import annotations

from typing import Any


def start_replica(runtime: Any, stage_id: int, replica_id: int) -> Any:
    """Start it as vLLM-Omni has done at first; takes as long as that did.

    Args:
        runtime: vLLM-Omni's `StageRuntime`.

    Returns:
        Its client.

    Raises:
        Exception: what starting it raises.
    """
    plans = runtime._prepare_stage_plans()
    plan = next(plan for plan in plans[stage_id].replicas if plan.replica_id == replica_id)
    return runtime._initialize_replica(plan, runtime._stage_init_timeout)
