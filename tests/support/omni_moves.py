"""`Rig` with replicas that move: its runtime says which devices each has, and starts them where it is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tests.support.omni_stages import Rig, Runtime, StageSpec
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.omni.stages.placement.replica_migrator import MigrationOutcome


class PlacedRuntime(Runtime):
    """Runtime that records placement. ``on``: the devices of what was started, in order."""

    on: list[tuple[int, int, str | None]]
    _stage_configs: list[Any]

    def _prepare_stage_plans(self) -> list[Any]:
        plans = super()._prepare_stage_plans()
        for stage in plans:
            for plan in stage.replicas:
                config = self._stage_configs[plan.stage_id].runtime_config
                plan.metadata = SimpleNamespace(replica_id=plan.replica_id, runtime_cfg=config)
        return plans

    def _initialize_replica(self, plan: Any, timeout: float) -> Any:
        client = super()._initialize_replica(plan, timeout)
        self.on.append((plan.stage_id, plan.metadata.replica_id, plan.metadata.runtime_cfg.devices))
        return client


class MovingRig(Rig):
    """Device n of all is that of the n-th replica, counted over the stages."""

    widths: dict[int, int] = {}  # noqa: RUF012 - devices of a replica, by stage, where it is not one

    async def __aenter__(self) -> MovingRig:
        await super().__aenter__()
        runtime: Any = self.runtime
        runtime.__class__ = PlacedRuntime
        runtime.on, runtime._stage_configs, first = [], [], 0
        for number, spec in enumerate(self.stages):
            width = self.widths.get(number, 1)
            devices = ",".join(str(first + i) for i in range(spec.replicas * width))
            first += spec.replicas * width
            runtime._stage_configs.append(config_of(spec, devices, width))
        self.omni._orch_monitor.register_replica = lambda stage_id, replica_id: None
        self.migrator = self.omni.migrator
        return self

    async def settle(self) -> None:
        for _ in range(400):
            await super().settle()
            held_back = not self.runtime.go.is_set() and self.runtime.starting
            if not self.migrator.busy or self.migrator.is_draining or held_back:
                return
        raise AssertionError("a move does not come to rest")

    async def hand_over(self, replica: Replica, stage_id: int) -> MigrationOutcome:
        """Until it is over."""
        return await self._over(self.migrator.hand_over(replica, stage_id))

    async def relocate(self, replica: Replica, devices: str) -> MigrationOutcome:
        """Until it is over."""
        return await self._over(self.migrator.relocate(replica, devices))

    async def _over(self, move: Any) -> MigrationOutcome:
        await self.tick()
        return result(move)

    async def tick(self, seconds: float = 0.1) -> None:
        await self.settle()
        self.migrator.tick()
        await super().tick(seconds)

    def live(self) -> list[list[int]]:
        """Return the live replicas of each stage."""
        return [pool.live_replica_ids() for pool in self.omni.stage_pools]

    def incidents(self, stage_id: int, replica_id: int) -> dict[str, int]:
        found = self.driver.board.replicas[stage_id, replica_id].incidents
        return {kind: count for kind, count in found.items() if count}


def config_of(spec: StageSpec, devices: str, width: int) -> Any:
    return SimpleNamespace(
        stage_type="llm",
        runtime_config=SimpleNamespace(devices=devices, num_replicas=spec.replicas),
        parallel_config=SimpleNamespace(tensor_parallel_size=width, pipeline_parallel_size=1, data_parallel_size=1),
    )


def at(stage_id: int, index: int) -> Replica:
    return Replica(stage_id, index)


def result(task: Any) -> MigrationOutcome:
    """Return the outcome of a move that is over."""
    assert isinstance(task, asyncio.Task)
    assert task.done()
    outcome: MigrationOutcome = task.result()
    return outcome
