"""Keep the clients of replicas on other hosts that are silent, and use them again once they are heard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.distributed.omni_coordinator import ReplicaStatus

from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.stages.recovery.async_chunk_recovery import abort_run
from vllm_omni_sched.omni.stages.reports.processes import release_client

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)

KEEP_SECONDS = 600.0  # after so long, vLLM-Omni's coordinator forgets a silent replica, too


@dataclass(frozen=True)
class Absent:
    """A silent replica: its address and client, what it runs, and since when it is silent."""

    pool: ScheduledPool
    replica_id: int
    address: str
    client: Any
    runs: tuple[str, ...]
    since: float


class AbsentReplicas:
    """Handles replicas that vLLM-Omni's coordinator reports no longer, and reports again.

    vLLM-Omni closes the client of such a replica at once, and uses the replica only if its process is started anew.

    1. A replica that is no longer reported counts as dead: recovery moves its requests.
    2. Its process may live, because it was stopped or its link is cut. So its client stays open for `KEEP_SECONDS`. If
       the replica is reported again, what it still runs is aborted there, and it serves again.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator) -> None:
        self._orchestrator = orchestrator
        self._absent: dict[tuple[int, int], Absent] = {}

    def __len__(self) -> int:
        """Return the number of silent replicas whose clients are kept."""
        return len(self._absent)

    def silent(self, pool: ScheduledPool, replica_id: int, address: str, client: Any) -> None:
        """Record that a replica, which no longer is in its pool, is not reported any more."""
        names = self._orchestrator.recovery.names
        assert names is not None
        works = [one for one in pool.queue.running.values() if one.replica_id == replica_id and one.sent]
        runs = tuple(names.present(one.runs_as) for one in works)
        now = self._orchestrator.clock()
        self._absent[pool.stage_id, replica_id] = Absent(pool, replica_id, address, client, runs, now)
        where = pool.host_of(replica_id, client) or "the host of the front end"
        error = EngineDeadError(f"no heartbeat from its process on {where}")
        self._orchestrator.spawn(self._orchestrator._handle_dead_replica(pool.stage_id, replica_id, error))

    def check(self, now: float) -> None:
        """Use replicas again that are reported again, and give up others after `KEEP_SECONDS`."""
        for key, one in list(self._absent.items()):
            if one.pool.clients[one.replica_id] is not None:  # another process has taken its place
                self._close(key)
            elif one.address in _reported(one.pool):
                del self._absent[key]
                self._orchestrator.spawn(self._back(one))
            elif now - one.since >= KEEP_SECONDS:
                self._close(key)

    async def _back(self, one: Absent) -> None:
        stage_id, replica_id = one.pool.stage_id, one.replica_id
        logger.warning(
            "stage %d replica %d is heard again; the %d requests that it had have moved and are aborted there",
            stage_id,
            replica_id,
            len(one.runs),
        )
        for run in one.runs:
            await abort_run(one.client, run)
        if one.pool.clients[replica_id] is None:
            one.pool.add_client(one.address, one.client, replica_id=replica_id, cause="it is heard again")

    def _close(self, key: tuple[int, int]) -> None:
        one = self._absent.pop(key)
        try:
            one.client.shutdown()
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is not used again
            logger.warning("closing the client of stage %d replica %d failed: %s", *key, error)
        release_client(one.client)

    def close(self) -> None:
        """Close all clients that are kept."""
        for key in list(self._absent):
            self._close(key)


def _reported(pool: ScheduledPool) -> set[str]:
    """Return the addresses of the replicas of a stage that the coordinator reports."""
    if pool._hub is None:
        return set()
    return {one.input_addr for one in pool._hub.get_replicas_for_stage(pool.stage_id).replicas if _is_up(one)}


def _is_up(replica: Any) -> bool:
    return bool(replica.status == ReplicaStatus.UP)
