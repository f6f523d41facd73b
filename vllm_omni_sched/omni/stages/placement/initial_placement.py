"""Choose the devices on which stages start, from the profiles of the options, before vLLM-Omni starts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_options.graph import PartitionOptions
from vllm_omni_sched.graph.partition import Device, Partitioner, PartitionSnapshot, StageProfile
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


def assign_initial_devices(options: PartitionOptions, stage_configs: Sequence[Any]) -> None:
    """Assign devices by the best plan to stages with one replica on one device that the options name.

    If such a stage has no profile, all stages start as in the deploy YAML, and are measured.

    Raises:
        ConfigError: no plan fits.
    """
    placed, fixed = {}, dict.fromkeys(options.devices, 0)
    for number, config in enumerate(stage_configs):
        runtime: Any = getattr(config, "runtime_config", None)
        devices = [one.strip() for one in str(getattr(runtime, "devices", None) or "").split(",")]
        profile = options.profile_of(number, _name(config))
        if len(devices) == 1 and devices[0] in options.devices and runtime.num_replicas == 1:
            if profile is None:
                logger.info(
                    "stages start as in the deploy YAML: stage %d has no profile in 'graph.partition.profiles'", number
                )
                return
            placed[number] = StageProfile(number, profile.memory_bytes, 0, profile.seconds)
        elif profile is not None:
            for device in set(devices) & set(fixed):
                fixed[device] += profile.memory_bytes * devices.count(device)
    if not placed:
        return
    found = [
        Device(name, max(device.memory_bytes - fixed[name], 0), device.speed)
        for name, device in options.devices.items()
    ]
    plan = Partitioner(options.min_gain).plan(PartitionSnapshot(tuple(found), tuple(placed.values())), None, 0.0)
    if plan.assignment is None:
        raise ConfigError(f"option 'graph.partition': {plan}; name more devices, or correct 'profiles'")
    logger.info("partition: %s", plan)
    for number, device in plan.assignment.items():
        stage_configs[number].runtime_config.devices = device


def _name(config: Any) -> str:
    return getattr(config, "model_stage", None) or ""
