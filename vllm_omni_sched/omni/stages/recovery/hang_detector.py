"""Detect replicas that hang although their processes live, stop sending them work, and finally kill them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.core.pipeline.hangs import (
    NOTICED_SECONDS,
    HangAction,
    HangStep,
    ReplicaHangs,
    ReplicaView,
    ReplicaWork,
)
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.omni.stages.reports import processes
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)


class HangDetector:
    """Shows the replicas to `ReplicaHangs`, and does what it decides."""

    def __init__(self, orchestrator: ScheduledOrchestrator, config: StageSchedConfig) -> None:
        self._orchestrator = orchestrator
        self.hangs = ReplicaHangs.of(config, orchestrator.driver.graph)

    def on_output(self, stage_id: int, replica_id: int) -> None:
        """Record that a replica has sent a message."""
        if self.hangs is not None:
            self.hangs.heard(stage_id, replica_id, self._orchestrator.clock())

    def check(self, now: float) -> None:
        """Check all replicas, and act on those that hang or no longer do."""
        if self.hangs is None or not self.hangs.is_due(now):
            return
        pools = self._orchestrator.stage_pools
        views = [self._view(pool, replica_id) for pool in pools for replica_id in pool.live_replica_ids()]
        for action in self.hangs.check(now, views):
            self._apply(action)

    def _view(self, pool: ScheduledPool, replica_id: int) -> ReplicaView:
        client = pool.clients[replica_id]
        pids = processes.pids_of(client)
        return ReplicaView(
            stage_id=pool.stage_id,
            replica_id=replica_id,
            client=client,
            local=bool(pids),
            works=tuple(self._work(work) for work in pool.queue.running.values() if work.replica_id == replica_id),
            owes=lambda: bool(self._orchestrator.recovery.handovers.of_replica(pool.stage_id, replica_id)),
            stopped=lambda: processes.any_stopped(processes.with_children(pids)),
            cpu_seconds=lambda: processes.cpu_seconds(processes.with_children(pids)),
        )

    def _work(self, work: Work) -> ReplicaWork:
        pools, name = self._orchestrator.stage_pools, work.request_id
        before = self._orchestrator.driver.graph.ancestors(work.stage_id)
        upstream = any(name in pools[one].queue.running or name in pools[one].queue.waiting for one in before)
        return ReplicaWork(work.sent, upstream, work.cost_seconds)

    def _apply(self, action: HangAction) -> None:
        pool, replica_id = self._orchestrator.stage_pools[action.stage_id], action.replica_id
        match action.step:
            case HangStep.REPORT:
                self._report(action, "recovery is off, so nothing is done")
            case HangStep.SUSPECT:
                pool.suspect(replica_id, cause=self._report(action, "it gets no new requests"))
            case HangStep.TRUST:
                logger.warning("stage %s no longer hangs and gets new requests again", action.subject)
                pool.suspect(replica_id, on=False)
                self._orchestrator.spawn(self._orchestrator.release())
            case HangStep.KILL:
                logger.error(
                    "stage %s still hangs after another %g s (runtime.recovery.hang_seconds); killing its processes",
                    action.subject,
                    action.seconds,
                )
                if (journal := self._orchestrator.driver.journal) is not None:
                    journal.killed(action.stage_id, replica_id, action.seconds)
                self.terminate(pool, replica_id)
            case HangStep.FORGET:
                pool.suspect(replica_id, on=False)

    def terminate(self, pool: ScheduledPool, replica_id: int) -> None:
        """Kill the processes of a replica, and see to it that its death is handled."""
        processes.kill(processes.with_children(processes.pids_of(pool.clients[replica_id])))
        self._orchestrator.spawn(self._died(pool, replica_id))

    def _report(self, action: HangAction, follows: str) -> str:
        """Log and count that a replica hangs; return why it counts as hanging."""
        why = f"it has work but has sent and computed nothing for {action.seconds:.3g} s"
        logger.warning("stage %s hangs: %s; %s", action.subject, why, follows)
        driver, now = self._orchestrator.driver, self._orchestrator.clock()
        driver.board.anomaly(action.stage_id, AnomalyKind.SILENT_REPLICA.value)
        evidence = {"replica": float(action.replica_id), "seconds": action.seconds}
        found = Anomaly(AnomalyKind.SILENT_REPLICA, action.subject, now - action.seconds, evidence)
        driver.anomaly(action.stage_id, found, now)
        return why

    async def _died(self, pool: ScheduledPool, replica_id: int) -> None:
        """Wait until vLLM-Omni detects the end of the processes, and report it if it does not."""
        client, loop = pool.clients[replica_id], asyncio.get_running_loop()
        until = loop.time() + NOTICED_SECONDS
        while replica_id in pool.live_replica_ids() and pool.clients[replica_id] is client:
            if loop.time() >= until:
                error = processes.ReplicaDeadError(client, "it was killed because it hung")
                await self._orchestrator._handle_dead_replica(pool.stage_id, replica_id, error)
                return
            await asyncio.sleep(0.01)
