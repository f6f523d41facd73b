"""Stages go where a plan on what they are measured to need puts them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_moves import MovingRig
from tests.support.omni_stages import StageSpec
from vllm_omni_sched.core.pipeline.placement import CHECK_SECONDS
from vllm_omni_sched.graph.partition import PartitionReason

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

FIRST, LAST = StageSpec(), StageSpec(final_output=True)


def partition(*memory: int, **how: object) -> dict[str, object]:
    devices = {str(i): {"memory_bytes": each} for i, each in enumerate(memory)}
    return {"partition": {"enabled": True, "devices": devices, "cooldown_seconds": 0.0, **how}}


async def measured(rig: MovingRig, *held: int, seconds: tuple[float, float] = (1.0, 1.0)) -> None:
    """Each stage takes a second, or as given, and holds so many bytes."""
    await rig.ask("a")
    for stage_id in range(len(rig.stages)):
        rig.now += seconds[stage_id]
        await rig.finish(stage_id, "a")
    for stage_id, nbytes in enumerate(held):
        rig.driver.board.memory(stage_id, 0, None, nbytes)


async def looked(rig: MovingRig) -> PartitionReason | None:
    rig.now += CHECK_SECONDS
    assert rig.omni.layout is not None
    plan = rig.omni.layout.check(rig.omni.stage_pools, rig.now)
    await rig.settle()
    return plan.reason if plan is not None else None


class SharedDeviceRig(MovingRig):
    """All stages on device 0."""

    async def __aenter__(self) -> MovingRig:
        rig = await super().__aenter__()
        for config in rig.runtime._stage_configs:
            config.runtime_config.devices = "0"
        return rig


def where(rig: MovingRig, stage_id: int) -> list[str | None]:
    return [rig.migrator.devices.devices_of(one) for one in rig.migrator.devices.replicas(stage_id)]


async def test_stages_of_one_device_part_when_that_doubles_the_throughput() -> None:
    async with SharedDeviceRig(FIRST, LAST, graph=partition(100, 100)) as rig:
        await measured(rig, 40, 40)
        assert await looked(rig) is PartitionReason.BETTER
        await rig.tick()
        assert sorted(where(rig, 0) + where(rig, 1)) == ["0", "1"]
        assert await looked(rig) is None  # the new one is not measured yet
        for one in rig.migrator.devices.replicas(0) + rig.migrator.devices.replicas(1):
            rig.driver.board.memory(one.stage, one.index, None, 40)
        assert await looked(rig) is PartitionReason.HELD
        await rig.ask("b")
        for stage_id in range(2):
            await rig.finish(stage_id, "b")
        assert rig.answer("b") == rig.expected()


async def test_off_by_default() -> None:
    async with MovingRig(FIRST, LAST) as rig:
        assert rig.omni.layout is None
