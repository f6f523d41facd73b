"""Choose the devices on which stages start, from the profiles of the options, before vLLM-Omni starts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_options.graph import PartitionOptions, ProfileOptions
from vllm_omni_sched.core.pipeline.placement import first_plan, first_snapshot
from vllm_omni_sched.graph.partition import Partitioner, Plan
from vllm_omni_sched.graph.partition_model import Score
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


def assign_initial_devices(options: PartitionOptions, stage_configs: Sequence[Any]) -> None:
    """Assign devices by the best plan to stages with one replica on one device that the options name.

    If such a stage has no profile, all stages start as in the deploy YAML, and are measured. Stages keep their
    `tensor_parallel_size`; ``doctor --stages`` suggests another one.

    Raises:
        ConfigError: no plan fits.
    """
    placed, fixed = _placed_and_fixed(options, stage_configs, splits=False)
    for number in [number for number, profile in placed.items() if profile is None][:1]:
        logger.info("stages start as in the deploy YAML: stage %d has no profile in 'graph.partition.profiles'", number)
    for number in (number for number, profile in placed.items() if profile is not None and profile.tensor_parallel):
        logger.info(
            "stage %d keeps its tensor_parallel_size, which vLLM-Omni cannot change while it runs; "
            "vllm-omni-sched doctor --stages suggests one for the deploy YAML",
            number,
        )
    names = {number: _name(config) for number, config in enumerate(stage_configs)}
    try:
        plan = first_plan(options, placed, fixed, options.payloads(names), splits=False)
    except ConfigError as error:
        better = suggest_devices(options, stage_configs)
        if better is None or not better.stages:
            raise
        raise ConfigError(f"{error}; or split a stage in the deploy YAML: stages {better.stages}") from None
    if plan is None or plan.assignment is None:
        return
    logger.info("partition: %s", plan)
    for number, device in plan.assignment.items():
        stage_configs[number].runtime_config.devices = device


def _placed_and_fixed(
    options: PartitionOptions, stage_configs: Sequence[Any], splits: bool
) -> tuple[dict[int, ProfileOptions | None], dict[str, int]]:
    """Return the stages that may be placed with their profiles, and the bytes that all others hold, by device.

    Args:
        splits: a stage on several devices may be placed, too.
    """
    placed: dict[int, ProfileOptions | None] = {}
    fixed = dict.fromkeys(options.devices, 0)
    for number, config in enumerate(stage_configs):
        devices, profile = _devices(config), options.profile_of(number, _name(config))
        runtime = getattr(config, "runtime_config", None)
        replicas = getattr(runtime, "num_replicas", 1)
        known = devices and set(devices) <= set(options.devices)
        if known and replicas == 1 and (splits or len(devices) == 1):
            placed[number] = profile
        elif profile is not None:
            for device in set(devices) & set(fixed):
                fixed[device] += -(-replicas * profile.memory_bytes * devices.count(device) // len(devices))
    return placed, fixed


@dataclass(frozen=True)
class Suggestion:
    """The best plan for the start of stages, with degrees of tensor parallelism that the deploy YAML does not have.

    ``present``: score of the deploy YAML; None if it does not fit, or splits a stage as no profile says.
    ``unprofiled``: names of the stages for which there is no profile, and therefore no plan.
    """

    plan: Plan | None
    present: Score | None = None
    unprofiled: tuple[str, ...] = ()

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Return the suggested keys of each stage in the deploy YAML."""
        assignment = (self.plan.assignment if self.plan is not None else None) or {}
        return [
            {"stage_id": number, "devices": place, "tensor_parallel_size": place.count(",") + 1}
            for number, place in sorted(assignment.items())
        ]


def suggest_devices(options: PartitionOptions, stage_configs: Sequence[Any]) -> Suggestion | None:
    """Return the devices and degrees that the stages should start with; None if no stage may be placed.

    Stages with one replica may be placed, on devices that the options name.
    """
    placed, fixed = _placed_and_fixed(options, stage_configs, splits=True)
    if not placed:
        return None
    unprofiled = [number for number, profile in placed.items() if profile is None]
    if unprofiled:
        return Suggestion(None, unprofiled=tuple(_name(stage_configs[one]) or str(one) for one in unprofiled))
    names = {number: _name(config) for number, config in enumerate(stage_configs)}
    snapshot = first_snapshot(options, placed, fixed, options.payloads(names), splits=True)
    assert snapshot is not None
    plan = Partitioner(options.min_gain).plan(snapshot, None, 0.0)
    present = {number: ",".join(_devices(stage_configs[number])) for number in placed}
    score = snapshot.score(present) if snapshot.covers(present) and snapshot.fits(present) else None
    return Suggestion(plan, score)


def _devices(config: Any) -> list[str]:
    """Return the devices of a stage; none if vLLM-Omni chooses them."""
    devices = str(getattr(getattr(config, "runtime_config", None), "devices", None) or "")
    return [one.strip() for one in devices.split(",") if one.strip()]


def _name(config: Any) -> str:
    return getattr(config, "model_stage", None) or ""
