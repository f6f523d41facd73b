"""Start a replica of a stage, again on its own devices or on others."""

from __future__ import annotations

import copy
from typing import Any

from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.omni.stages.placement.device_assignment import DeviceAssignment
from vllm_omni_sched.omni.stages.start.preload import Preloader


def start_replica(
    runtime: Any,
    stage_id: int,
    replica_id: int,
    devices: DeviceAssignment | None = None,
    preloader: Preloader | None = None,
) -> Any:
    """Start a replica as vLLM-Omni does at first, which takes as long.

    Args:
        runtime: vLLM-Omni's `StageRuntime`.
        devices: holds the devices of replicas that were moved from those of the deploy YAML.
        preloader: reads the checkpoint ahead while the processes start; None: it is not read ahead.

    Returns:
        The replica's client.

    Raises:
        Exception: any error of the start.
    """
    plans = runtime._prepare_stage_plans()
    replicas = plans[stage_id].replicas
    plan = next((plan for plan in replicas if plan.replica_id == replica_id), None)
    replica = Replica(stage_id, replica_id)
    if plan is None or (devices is not None and devices.was_moved(replica)):
        if devices is None:
            raise ValueError(f"stage {stage_id} has no replica {replica_id}, and no devices are given for it")
        plan = _plan_on_devices(plan or replicas[0], replica_id, devices.devices_of(replica))
    if preloader is not None:
        preloader.begin([plan])
    return runtime._initialize_replica(plan, runtime._stage_init_timeout)


def _plan_on_devices(plan: Any, replica_id: int, devices: str | None) -> Any:
    """Return the plan changed to this replica number and these devices; configurations of others stay as they are."""
    plan.replica_id, plan.metadata.replica_id = replica_id, replica_id
    config = plan.metadata.runtime_cfg = copy.deepcopy(plan.metadata.runtime_cfg)
    if isinstance(config, dict):
        config["devices"] = devices
    elif config is not None:
        config.devices = devices
    return plan
