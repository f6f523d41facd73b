"""Check that the processes of replicas are alive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from vllm_omni_sched.omni.stages.reports.processes import ReplicaDeadError, processes_of

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

CHECK_SECONDS = 1.0


class Liveness:
    """Polls the processes of replicas and reports those that have ended.

    vLLM-Omni waits for the end of each process on a thread. That thread first shuts down the rest of the replica,
    and only then reports its death; if it gets stuck there or fails itself, it never does.

    Args:
        died: called for each dead replica with its stage, its id and the error.
    """

    def __init__(self, died: Callable[[int, int, ReplicaDeadError], Awaitable[None]]) -> None:
        self._died = died
        self._next = float("-inf")

    async def check(self, pools: list[ScheduledPool], now: float) -> None:
        """Report replicas that are dead and still in their pool; reporting removes them from it."""
        if now < self._next:
            return
        self._next = now + CHECK_SECONDS
        for pool in pools:
            for replica_id in pool.live_replica_ids():
                client = pool.clients[replica_id]
                ended = next((each for each in processes_of(client) if not each.is_alive()), None)
                if ended is not None:
                    error = ReplicaDeadError(client, f"process {ended.name} exited with code {ended.exitcode}")
                    await self._died(pool.stage_id, replica_id, error)
