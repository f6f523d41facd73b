"""Looks at whether the processes of replicas live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_sched.omni.stages.processes import started_by


class Liveness:
    """Tells of replicas whose processes have ended, by looking, every so often.

    vLLM-Omni waits for the end of each process on a thread. That thread first shuts down what is left of the replica,
    and only then says that it is dead; one that is stuck in that, or has itself failed, never says so.

    Args:
        interval_seconds: between two looks.
        died: told of each dead replica: its stage, itself, and why.
    """

    def __init__(self, interval_seconds: float, died: Callable[[int, int, EngineDeadError], Awaitable[None]]) -> None:
        self._interval_seconds, self._died = interval_seconds, died
        self._next = float("-inf")

    async def look(self, pools: list[Any], now: float) -> None:
        """Tell of those that are dead and still in their pool; once told, they are in it no more."""
        if now < self._next:
            return
        self._next = now + self._interval_seconds
        for pool in pools:
            for replica_id in pool.live_replica_ids():
                ended = next((each for each in started_by(pool.clients[replica_id]) if not each.is_alive()), None)
                if ended is not None:
                    error = EngineDeadError(f"process {ended.name} has ended with exit code {ended.exitcode}")
                    await self._died(pool.stage_id, replica_id, error)
