"""Plan the device of each stage from its measured needs, and move stages while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm_omni_sched.config.stage_options.graph import PartitionOptions
from vllm_omni_sched.graph.partition import Device, Partitioner, PartitionSnapshot, Plan, StageProfile
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.omni.stages.placement.replica_migrator import MigrationOutcome, ReplicaMigrator

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)

CHECK_SECONDS = 5.0  # between two checks of the processes' memory


class StageLayout:
    """Places stages that have one replica on one device that the options name; all others stay where they are.

    1. A stage needs the memory that its replica holds, and the device seconds of its requests; both must be known for
       all stages before anything is planned. A profile in the options sets the seconds and the least memory.
    2. `Partitioner` plans the devices: for more throughput, or because the memory of a device no longer suffices.
    3. One stage moves at a time, first one whose target has room, since the new replica starts before the old
       one stops. If there is none, nothing moves.

    Args:
        options: the devices, and bounds for changes of the plan.
        seconds: returns the device seconds of a request in a stage; None: not known yet.
        names: names of the stages.
    """

    def __init__(
        self,
        options: PartitionOptions,
        migrator: ReplicaMigrator,
        board: StageBoard,
        seconds: Callable[[int], float | None],
        names: Mapping[int, str],
    ) -> None:
        self._profiles = {stage_id: options.profile_of(stage_id, name) for stage_id, name in names.items()}
        self._options, self._migrator, self._board, self._seconds = options, migrator, board, seconds
        self._partitioner = Partitioner(options.min_gain, options.cooldown_seconds)
        self._next = 0.0
        self._logged: str | None = None
        self._wanted: Mapping[int, str] | None = None  # target of a plan with more than one move
        self._move: asyncio.Task[MigrationOutcome] | None = None

    def check(self, pools: list[ScheduledPool], now: float) -> Plan | None:
        """Plan once per interval, begin the next move, and return the new plan; None if nothing was planned."""
        if now < self._next or self._migrator.busy:
            return None
        self._next = now + CHECK_SECONDS
        current = self._placed(pools)
        found = self._snapshot(pools, current)
        if found is None:
            return None
        if self._continue_plan(found, current):
            return None
        plan = self._partitioner.plan(found, current, now)
        self._log(plan)
        if plan.assignment is not None and plan.moves:
            self._wanted = plan.assignment
            self._begin_move(found, current, plan.assignment)
        return plan

    def _continue_plan(self, found: PartitionSnapshot, current: Mapping[int, str]) -> bool:
        """Begin the next move of a plan if the last one succeeded, and return whether one was begun."""
        wanted, last = self._wanted, self._move
        done = last is not None and last.done() and not last.cancelled() and last.exception() is None
        if wanted is None or wanted == current or not found.covers(wanted) or not done or not found.fits(wanted):
            self._wanted = None
            return False
        assert last is not None
        return last.result() is MigrationOutcome.MOVED and self._begin_move(found, current, wanted)

    def _placed(self, pools: list[ScheduledPool]) -> dict[int, str]:
        """Return the devices of the stages that may be placed."""
        placed = {}
        for pool in pools:
            replicas = self._migrator.devices.replicas(pool.stage_id)
            devices = self._migrator.devices.devices_of(replicas[0]) if len(replicas) == 1 else None
            if devices in self._options.devices and pool.available_replica_ids():
                placed[pool.stage_id] = str(devices)
        return placed

    def _snapshot(self, pools: list[ScheduledPool], placed: Mapping[int, str]) -> PartitionSnapshot | None:
        held: dict[Replica, int] = {}
        for pool in pools:
            for replica in self._migrator.devices.replicas(pool.stage_id):
                held[replica] = self._bytes(replica)
        profiles = []
        for stage_id in placed:
            nbytes = next(count for replica, count in held.items() if replica.stage == stage_id)
            seconds, profile = self._seconds(stage_id), self._profiles[stage_id]
            if profile is not None:
                profiles.append(StageProfile(stage_id, max(nbytes, profile.memory_bytes), 0, profile.seconds))
            elif not nbytes or seconds is None:
                return None
            else:
                speed = self._options.devices[placed[stage_id]].speed
                profiles.append(StageProfile(stage_id, nbytes, 0, seconds * speed))
        devices = []
        for name, device in self._options.devices.items():
            fixed = [
                count
                for replica, count in held.items()
                if replica.stage not in placed and name in (self._migrator.devices.devices_of(replica) or "").split(",")
            ]
            devices.append(Device(name, max(device.memory_bytes - sum(fixed), 0), device.speed))
        return PartitionSnapshot(tuple(devices), tuple(profiles)) if profiles else None

    def _bytes(self, replica: Replica) -> int:
        """Return the device memory of a replica if it is measured, else its host memory."""
        facts = self._board.replicas.get((replica.stage, replica.index))
        return (facts.device_bytes or facts.host_bytes or 0) if facts is not None else 0

    def _begin_move(self, found: PartitionSnapshot, current: Mapping[int, str], wanted: Mapping[int, str]) -> bool:
        devices = {device.device_id: device for device in found.devices}
        used = dict.fromkeys(devices, 0)
        for stage in found.stages:
            used[current[stage.stage_id]] += found.bytes_of(stage)
        for stage in found.stages:
            target = devices[wanted[stage.stage_id]]
            if target.device_id == current[stage.stage_id]:
                continue
            if used[target.device_id] + found.bytes_of(stage) > target.memory_bytes:
                continue
            (replica,) = self._migrator.devices.replicas(stage.stage_id)
            move = self._migrator.relocate(replica, target.device_id)
            if not isinstance(move, MigrationOutcome):
                logger.info("moving stage %d to device %s", stage.stage_id, target.device_id)
                self._move = move
                return True
            logger.info("stage %d cannot move to device %s: %s", stage.stage_id, target.device_id, move.value)
        self._move = None
        return False

    def _log(self, plan: Plan) -> None:
        text = str(plan)
        if text != self._logged and (plan.moves or plan.assignment is None):
            logger.warning("partition: %s", text)
        self._logged = text
