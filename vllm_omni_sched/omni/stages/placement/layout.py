"""Place stages on devices by their measured needs, and move them while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm_omni_sched.config.stage_options.graph import PartitionOptions
from vllm_omni_sched.core.pipeline.placement import PlacedStage, StageMove, StagePlacement
from vllm_omni_sched.graph.partition import Plan
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.omni.stages.placement.replica_migrator import MigrationOutcome, ReplicaMigrator

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)


class StageLayout:
    """Tells `StagePlacement` what stages need and where they are, and passes its moves to the migrator.

    Stages that have one replica on one device that the options name may be placed; all others stay where they are.

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
        self._options, self._migrator, self._board, self._seconds = options, migrator, board, seconds
        self._placement = StagePlacement(options, names)
        self._logged: str | None = None
        self._move: asyncio.Task[MigrationOutcome] | None = None  # begun, with an end that was not reported yet

    def check(self, pools: list[ScheduledPool], now: float) -> Plan | None:
        """Plan if it is due, begin the next move, and return the new plan; None if nothing was planned."""
        if not self._placement.is_due(now, self._migrator.busy):
            return None
        if self._move is not None:
            self._placement.ended(_succeeded(self._move))
            self._move = None
        decision = self._placement.check(*self._facts(pools), now)
        plan = decision.plan
        while decision.move is not None and not self._begin(decision.move):
            decision = self._placement.refused()
            plan = decision.plan or plan
        if plan is not None:
            self._log(plan)
        return plan

    def _facts(self, pools: list[ScheduledPool]) -> tuple[list[PlacedStage], dict[str, int]]:
        """Return the stages that may be placed, and the bytes that all others hold by device."""
        placed, fixed = [], dict.fromkeys(self._options.devices, 0)
        for pool in pools:
            replicas = self._migrator.devices.replicas(pool.stage_id)
            on = [self._migrator.devices.devices_of(replica) or "" for replica in replicas]
            if len(on) == 1 and on[0] in fixed and pool.available_replica_ids():
                seconds = self._seconds(pool.stage_id)
                placed.append(PlacedStage(pool.stage_id, on[0], self._bytes(replicas[0]), seconds))
                continue
            for replica, devices in zip(replicas, on, strict=True):
                for device in set(devices.split(",")) & set(fixed):
                    fixed[device] += self._bytes(replica)
        return placed, fixed

    def _bytes(self, replica: Replica) -> int:
        """Return the device memory of a replica if it is measured, else its host memory."""
        facts = self._board.replicas.get((replica.stage, replica.index))
        return (facts.device_bytes or facts.host_bytes or 0) if facts is not None else 0

    def _begin(self, move: StageMove) -> bool:
        """Begin a move, and return whether that was possible."""
        (replica,) = self._migrator.devices.replicas(move.stage_id)
        begun = self._migrator.relocate(replica, move.target)
        if isinstance(begun, MigrationOutcome):
            logger.info("stage %d cannot move to device %s: %s", move.stage_id, move.target, begun.value)
            return False
        logger.info("moving stage %d to device %s", move.stage_id, move.target)
        self._move = begun
        return True

    def _log(self, plan: Plan) -> None:
        text = str(plan)
        if text != self._logged and (plan.moves or plan.assignment is None):
            logger.warning("partition: %s", "; ".join([text, *map(str, plan.changes)]))
        self._logged = text


def _succeeded(move: asyncio.Task[MigrationOutcome]) -> bool:
    """Return whether a move that is over has moved its replica."""
    return not move.cancelled() and move.exception() is None and move.result() is MigrationOutcome.MOVED
