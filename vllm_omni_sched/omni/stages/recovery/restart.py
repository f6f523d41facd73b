"""Start a replica of a stage, again on its own devices or on others."""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.omni.stages.placement.device_assignment import DeviceAssignment

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator

logger = get_logger(__name__)


def start_replica(
    runtime: Any,
    stage_id: int,
    replica_id: int,
    devices: DeviceAssignment | None = None,
) -> Any:
    """Start a replica as vLLM-Omni does at first, which takes as long.

    Args:
        runtime: vLLM-Omni's `StageRuntime`.
        devices: holds the devices of replicas that were moved from those of the deploy YAML.

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
    return runtime._initialize_replica(plan, runtime._stage_init_timeout)


async def put_into_service(
    orchestrator: ScheduledOrchestrator, runtime: Any, replica: Replica, cause: str = ""
) -> str | None:
    """Start a replica, and let it have requests; return the error, or None."""
    pool = orchestrator.stage_pools[replica.stage]
    try:
        start = partial(start_replica, runtime, replica.stage, replica.index, orchestrator.migrator.devices)
        client = await asyncio.get_running_loop().run_in_executor(None, start)
    except Exception as error:
        logger.exception("stage %d replica %d did not start", replica.stage, replica.index)
        return str(error) or type(error).__name__
    await orchestrator.forget_items(replica.stage)
    pool.attach(replica.index, client, cause)
    orchestrator.recovery.parking.unpark(replica.stage)
    await orchestrator.release()
    return None


def _plan_on_devices(plan: Any, replica_id: int, devices: str | None) -> Any:
    """Return the plan changed to this replica number and these devices; configurations of others stay as they are."""
    plan.replica_id, plan.metadata.replica_id = replica_id, replica_id
    config = plan.metadata.runtime_cfg = copy.deepcopy(plan.metadata.runtime_cfg)
    if isinstance(config, dict):
        config["devices"] = devices
    elif config is not None:
        config.devices = devices
    return plan
