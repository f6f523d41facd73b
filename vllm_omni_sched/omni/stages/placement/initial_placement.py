"""Choose the devices on which stages start, from the profiles of the options, before vLLM-Omni starts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni_sched.config.stage_options.graph import PartitionOptions, ProfileOptions
from vllm_omni_sched.core.pipeline.placement import first_plan
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


def assign_initial_devices(options: PartitionOptions, stage_configs: Sequence[Any]) -> None:
    """Assign devices by the best plan to stages with one replica on one device that the options name.

    If such a stage has no profile, all stages start as in the deploy YAML, and are measured.

    Raises:
        ConfigError: no plan fits.
    """
    placed: dict[int, ProfileOptions | None] = {}
    fixed = dict.fromkeys(options.devices, 0)
    for number, config in enumerate(stage_configs):
        runtime: Any = getattr(config, "runtime_config", None)
        devices = [one.strip() for one in str(getattr(runtime, "devices", None) or "").split(",")]
        profile = options.profile_of(number, _name(config))
        if len(devices) == 1 and devices[0] in options.devices and runtime.num_replicas == 1:
            placed[number] = profile
        elif profile is not None:
            for device in set(devices) & set(fixed):
                fixed[device] += profile.memory_bytes * devices.count(device)
    for number in [number for number, profile in placed.items() if profile is None][:1]:
        logger.info("stages start as in the deploy YAML: stage %d has no profile in 'graph.partition.profiles'", number)
    plan = first_plan(options, placed, fixed)
    if plan is None or plan.assignment is None:
        return
    logger.info("partition: %s", plan)
    for number, device in plan.assignment.items():
        stage_configs[number].runtime_config.devices = device


def _name(config: Any) -> str:
    return getattr(config, "model_stage", None) or ""
