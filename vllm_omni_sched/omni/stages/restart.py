"""A replica of a stage, started: again in its own place, or in another one."""

from __future__ import annotations

import copy
from typing import Any

from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.omni.stages.places import Places


def start_replica(runtime: Any, stage_id: int, replica_id: int, places: Places | None = None) -> Any:
    """Start it as vLLM-Omni has done at first; takes as long as that did.

    Args:
        runtime: vLLM-Omni's `StageRuntime`.
        places: with the devices of replicas that are elsewhere than the deploy YAML says.

    Returns:
        Its client.

    Raises:
        Exception: what starting it raises.
    """
    plans = runtime._prepare_stage_plans()
    replicas = plans[stage_id].replicas
    plan = next((plan for plan in replicas if plan.replica_id == replica_id), None)
    replica = Replica(stage_id, replica_id)
    if plan is None or (places is not None and places.moved(replica)):
        if places is None:
            raise ValueError(f"stage {stage_id} has no replica {replica_id}, and nothing says where one would run")
        plan = _elsewhere(plan or replicas[0], replica_id, places.of(replica))
    return runtime._initialize_replica(plan, runtime._stage_init_timeout)


def _elsewhere(plan: Any, replica_id: int, devices: str | None) -> Any:
    """The plan of a replica, as that of one of this number on these devices; configurations of others stay as is."""
    plan.replica_id, plan.metadata.replica_id = replica_id, replica_id
    config = plan.metadata.runtime_cfg = copy.deepcopy(plan.metadata.runtime_cfg)
    if isinstance(config, dict):
        config["devices"] = devices
    elif config is not None:
        config.devices = devices
    return plan
