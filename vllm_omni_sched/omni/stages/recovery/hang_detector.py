"""Detect replicas that hang although their processes live, stop sending them work, and finally kill them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psutil
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.anomaly.finding import Anomaly
from vllm_omni_sched.monitor.anomaly.silence import Silence
from vllm_omni_sched.omni.stages.reports import processes
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)

COMPUTES = 0.05  # fraction of a processor above which a replica counts as computing
NOTICED_SECONDS = 5.0  # in which vLLM-Omni detects that a process has ended


class HangDetector:
    """Reports replicas that have work but send and compute nothing to recovery.

    1. The work of a replica counts once the earlier stages are done with it: in async-chunk mode, a stage that is
       fed by a hanging one does not hang.
    2. A replica has work, too, while one of its processes is stopped and an output that it has reported may not have
       been sent to the next stage: it sends outputs after it has reported them. Unless stopped it is not checked for
       that, because a replica that has sent everything is as silent.
    3. A replica that hangs (`Silence`) gets no new work until it sends or computes something.
    4. If it hangs for ``hang_seconds`` more, its processes are killed, and recovery treats it as dead.
    5. Replicas whose processes run on another host are not checked.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator, config: StageSchedConfig) -> None:
        self._orchestrator = orchestrator
        self._options, self._hang_seconds = config.monitoring.anomaly, config.runtime.recovery.hang_seconds
        self._on = config.monitoring.enabled and self._options.enabled
        self._silence = Silence(
            floor_seconds=self._options.min_stage_seconds, cap_seconds=self._options.max_stage_seconds
        )
        self._names = {stage.stage_id: str(stage) for stage in orchestrator.driver.graph.stages}
        self._clients: dict[tuple[int, int], Any] = {}
        self._used: dict[tuple[int, int], tuple[float, float]] = {}  # time and processor time of the last check
        self._since: dict[tuple[int, int], float] = {}  # of replicas that hang
        self._killed: set[tuple[int, int]] = set()
        self._next = 0.0

    def on_output(self, stage_id: int, replica_id: int) -> None:
        """Record that a replica has sent a message."""
        self._silence.heard(self._names[stage_id], replica_id, self._orchestrator.clock())

    def check(self, now: float) -> None:
        """Check all replicas, and act on those that hang or no longer do."""
        if not self._on or now < self._next:
            return
        self._next = now + self._options.interval_seconds
        live = {
            (pool.stage_id, one): pool for pool in self._orchestrator.stage_pools for one in pool.live_replica_ids()
        }
        for key, client in list(self._clients.items()):
            if key not in live or live[key].clients[key[1]] is not client:  # it is gone or was replaced
                self._forget(key)
        self._clients = {key: pool.clients[key[1]] for key, pool in live.items()}
        for (_, replica_id), pool in live.items():
            self._observe(pool, replica_id, now)
        ids = {name: stage_id for stage_id, name in self._names.items()}
        found = {
            (ids[one.subject.rpartition(" replica ")[0]], int(one.evidence["replica"])): one
            for one in self._silence.check(now)
        }
        for key in [key for key in self._since if key not in found]:
            self._recovered(key, live[key])
        for key, one in found.items():
            if key in live and key not in self._killed:
                self._on_hang(key, live[key], one, now)

    def _observe(self, pool: ScheduledPool, replica_id: int, now: float) -> None:
        key, name = (pool.stage_id, replica_id), self._names[pool.stage_id]
        started = processes.pids_of(pool.clients[replica_id])
        works = [work for work in pool.queue.running.values() if work.replica_id == replica_id and self._fed(work)]
        work = bool(started) and (bool(works) or self._stopped_and_owes(key, started))
        silent = self._silence.silent_seconds(name, replica_id, now)
        computes = False
        if work and silent >= self._options.interval_seconds:
            computes = self._computes(key, processes.with_children(started), now)
        else:
            self._used.pop(key, None)
        expected = max((one.cost_seconds for one in works), default=0.0)
        self._silence.observe(name, replica_id, now, work=work, computes=computes, expected_seconds=expected)

    def _stopped_and_owes(self, key: tuple[int, int], started: list[int]) -> bool:
        if not self._orchestrator.recovery.handovers.of_replica(*key):
            return False
        return processes.any_stopped(processes.with_children(started))

    def _fed(self, work: Work) -> bool:
        before = self._orchestrator.stage_pools[: work.stage_id]
        name = work.request_id
        return work.sent and not any(name in pool.queue.running or name in pool.queue.waiting for pool in before)

    def _computes(self, key: tuple[int, int], of: list[psutil.Process], now: float) -> bool:
        """Return whether the replica has used processor time since the last check; True if that is not known."""
        used, before = processes.cpu_seconds(of), self._used.pop(key, None)
        if used is None:
            return True
        self._used[key] = now, used
        return before is None or used - before[1] > COMPUTES * (now - before[0])

    def _on_hang(self, key: tuple[int, int], pool: ScheduledPool, anomaly: Anomaly, now: float) -> None:
        recovery, (stage_id, replica_id) = self._orchestrator.recovery, key
        hang_seconds = self._hang_seconds if recovery.on else None
        if key not in self._since:
            self._since[key] = now
            why = f"it has work but has sent and computed nothing for {anomaly.evidence['seconds']:.3g} s"
            follows = "recovery is off, so nothing is done" if hang_seconds is None else "it gets no new requests"
            logger.warning("stage %s hangs: %s; %s", anomaly.subject, why, follows)
            self._orchestrator.driver.board.anomaly(stage_id, anomaly.kind.value)
            if hang_seconds is not None:
                pool.suspect(replica_id, cause=why)
        if hang_seconds is not None and now - self._since[key] >= hang_seconds:
            logger.error(
                "stage %s still hangs after another %g s (runtime.recovery.hang_seconds); killing its processes",
                anomaly.subject,
                hang_seconds,
            )
            self._killed.add(key)
            processes.kill(processes.with_children(processes.pids_of(pool.clients[replica_id])))
            self._orchestrator.spawn(self._died(pool, replica_id))

    async def _died(self, pool: ScheduledPool, replica_id: int) -> None:
        """Wait until vLLM-Omni detects the end of the processes, and report it if it does not."""
        client, loop = pool.clients[replica_id], asyncio.get_running_loop()
        until = loop.time() + NOTICED_SECONDS
        while replica_id in pool.live_replica_ids() and pool.clients[replica_id] is client:
            if loop.time() >= until:
                error = EngineDeadError("it was killed because it hung")
                await self._orchestrator._handle_dead_replica(pool.stage_id, replica_id, error)
                return
            await asyncio.sleep(0.01)

    def _recovered(self, key: tuple[int, int], pool: ScheduledPool) -> None:
        """Resume sending work to a replica that no longer hangs."""
        del self._since[key]
        if key in self._killed or key[1] not in pool.suspected:
            return
        logger.warning("stage %s replica %d no longer hangs and gets new requests again", self._names[key[0]], key[1])
        pool.suspect(key[1], on=False)
        self._orchestrator.spawn(self._orchestrator.release())

    def _forget(self, key: tuple[int, int]) -> None:
        self._since.pop(key, None)
        self._used.pop(key, None)
        self._killed.discard(key)
        self._orchestrator.stage_pools[key[0]].suspect(key[1], on=False)
        self._silence.forget(self._names[key[0]], key[1])
