"""Keep the clients of replicas on other hosts that are silent, and use them again once they are heard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_omni.distributed.omni_coordinator import ReplicaStatus

from vllm_omni_sched.core.pipeline.absences import Absences, AbsenceStep
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.stages.recovery.async_chunk_recovery import abort_run
from vllm_omni_sched.omni.stages.reports.processes import release_client

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)


@dataclass(frozen=True)
class Absent:
    """The client of a silent replica, its address, and the names of its runs in its engine."""

    address: str
    client: Any
    runs: tuple[str, ...]


class AbsentReplicas:
    """Does what `Absences` decides about replicas that vLLM-Omni's coordinator no longer reports.

    vLLM-Omni alone closes the client of such a replica at once, and uses the replica only if its process is started
    anew. Here recovery moves its requests, and the client stays open. When the replica is used again, what it still
    runs is aborted there.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator) -> None:
        self._orchestrator = orchestrator
        self._absences = Absences()
        self._absent: dict[tuple[int, int], Absent] = {}

    def __len__(self) -> int:
        """Return the number of silent replicas whose clients are kept."""
        return len(self._absent)

    def silent(self, pool: ScheduledPool, replica_id: int, address: str, client: Any) -> None:
        """Record that a replica is not reported any more, before its requests move."""
        names = self._orchestrator.recovery.names
        assert names is not None
        works = [one for one in pool.queue.running.values() if one.replica_id == replica_id and one.sent]
        runs = tuple(names.present(one.runs_as) for one in works)
        self._absent[pool.stage_id, replica_id] = Absent(address, client, runs)
        self._absences.silent(pool.stage_id, replica_id, address, self._orchestrator.clock())

    def check(self, now: float) -> None:
        """Use replicas again that are reported again, and close the clients of those that are given up."""
        pools = self._orchestrator.stage_pools
        for step, stage_id, replica_id in self._absences.check(
            now, lambda stage_id: _reported(pools[stage_id]), lambda stage, one: pools[stage].clients[one] is not None
        ):
            one = self._absent.pop((stage_id, replica_id))
            if step is AbsenceStep.USE:
                self._orchestrator.spawn(self._use(pools[stage_id], replica_id, one))
            else:
                _close(stage_id, replica_id, one.client)

    async def _use(self, pool: ScheduledPool, replica_id: int, one: Absent) -> None:
        logger.warning(
            "stage %d replica %d is heard again; the %d requests that it had have moved and are aborted there",
            pool.stage_id,
            replica_id,
            len(one.runs),
        )
        for run in one.runs:
            await abort_run(one.client, run)
        if pool.clients[replica_id] is None:
            pool.add_client(one.address, one.client, replica_id=replica_id, cause="it is heard again")
        else:  # another process has taken its number meanwhile
            _close(pool.stage_id, replica_id, one.client)

    def close(self) -> None:
        """Close all clients that are kept."""
        for (stage_id, replica_id), one in self._absent.items():
            _close(stage_id, replica_id, one.client)
        self._absent.clear()


def _close(stage_id: int, replica_id: int, client: Any) -> None:
    try:
        client.shutdown()
    except Exception as error:  # noqa: BLE001 - whatever it is, the client is not used again
        logger.warning("closing the client of stage %d replica %d failed: %s", stage_id, replica_id, error)
    release_client(client)


def _reported(pool: ScheduledPool) -> set[str]:
    """Return the addresses of the replicas of a stage that the coordinator reports."""
    if pool._hub is None:
        return set()
    replicas = pool._hub.get_replicas_for_stage(pool.stage_id).replicas
    return {one.input_addr for one in replicas if one.status == ReplicaStatus.UP}
