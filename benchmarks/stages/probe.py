"""What a pipeline does, seen from inside its front end: the same for stock vLLM-Omni and for ours."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil

CHECK_SECONDS = 0.005
PATIENCE_SECONDS = 120.0  # for a dead replica to be noticed, and to be back


class Probe:
    """Counts what is submitted to the engines, knows their processes, and can kill one."""

    def __init__(self) -> None:
        self.submitted: Counter[tuple[int, int]] = Counter()  # (stage, replica)
        self.pools: dict[int, Any] = {}
        self.restarts: list[float] = []  # seconds that each took

    def install(self) -> None:
        """Install the probe, before the pipeline starts."""
        from vllm_omni.engine.stage_pool import StagePool

        from vllm_omni_sched.omni.stages.recovery import restart

        submit, start = StagePool.submit_initial, restart.start_replica

        async def submit_initial(pool: Any, *arguments: Any, **more: Any) -> int:
            self.pools[pool.stage_id] = pool
            replica_id: int = await submit(pool, *arguments, **more)
            self.submitted[pool.stage_id, replica_id] += 1
            return replica_id

        def start_replica(*arguments: Any) -> Any:
            began = time.monotonic()
            try:
                return start(*arguments)
            finally:
                self.restarts.append(time.monotonic() - began)

        # ours comes to the first one as well, with what it hands to an engine, and only with that
        StagePool.submit_initial, restart.start_replica = submit_initial, start_replica

    def runs(self, stage_id: int) -> int:
        """Count how often the stage was given something to do."""
        return sum(count for (stage, _), count in self.submitted.items() if stage == stage_id)

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of the front end and of each replica since its start."""
        seconds = {"front end": _seconds([os.getpid()])}
        for stage_id, pool in sorted(self.pools.items()):
            for replica_id in pool.live_replica_ids():
                seconds[f"{stage_id}/{replica_id}"] = _seconds(self.pids(stage_id, replica_id))
        return seconds

    def pids(self, stage_id: int, replica_id: int) -> list[int]:
        manager = self.pools[stage_id].clients[replica_id].resources.engine_manager
        return [process.pid for process in manager.processes]

    async def kill(
        self, stage_id: int, replica_id: int, after: int, in_flight: Callable[[], int], until_back: bool
    ) -> dict[str, Any]:
        """SIGKILL a replica once the stage was given ``after`` requests more than now.

        Returns:
            Requests in flight at that moment; seconds until the replica was taken out, and until it is in again; what
            starting it took.
        """
        first, restarts = self.runs(stage_id), len(self.restarts)
        await until(lambda: self.runs(stage_id) - first >= after)
        alive = in_flight()
        for pid in self.pids(stage_id, replica_id):
            os.kill(pid, signal.SIGKILL)
        killed, pool = time.monotonic(), self.pools[stage_id]
        noticed = await until(lambda: replica_id not in pool.live_replica_ids())
        back = await until(lambda: replica_id in pool.live_replica_ids()) if until_back else None
        return {
            "in_flight": alive,
            "noticed_seconds": None if noticed is None else noticed - killed,
            "back_seconds": None if back is None else back - killed,
            "restart_seconds": self.restarts[-1] if len(self.restarts) > restarts else None,
        }


async def until(condition: Callable[[], bool]) -> float | None:
    """Wait for the condition; return when it was found to hold, or None if it never was."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if condition():
            return time.monotonic()
        await asyncio.sleep(CHECK_SECONDS)
    return None


def _seconds(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total
