"""Move replicas to another stage or to other devices while requests run."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery.events import Incident, IncidentKind, Replica
from vllm_omni_sched.omni.stages.placement.device_assignment import DeviceAssignment
from vllm_omni_sched.omni.stages.recovery.restart import put_into_service
from vllm_omni_sched.omni.stages.reports.processes import release_client

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)


class MigrationOutcome(str, Enum):
    """Names the outcome of moving a replica, or the reason for refusing to."""

    MOVED = "moved"
    BUSY = "busy"  # refused: another move is in progress
    GONE = "gone"  # refused: the replica does not exist or does not serve
    LAST = "last"  # refused: it is the last replica of its stage
    MISFIT = "misfit"  # refused: the other stage needs a different number of devices
    DISTRIBUTED = "distributed"  # refused: stages on several hosts start their replicas themselves
    STAYED = "stayed"  # it was not empty in time
    DIED = "died"  # it died before it was empty; recovery handles it
    BACK = "back"  # the new replica did not start; the old one was started again
    LOST = "lost"  # the new replica did not start, and neither did the old one


class ReplicaMigrator:
    """Stops replicas and starts others on their devices, one move at a time.

    1. A replica that is to leave gets no new work. It is stopped when none of the requests that it had are in the
       pipeline any more; that is later than necessary for itself, but later stages may still fetch data from it. A
       replica that is not empty within ``drain_seconds`` stays.
    2. The last replica of a stage is never stopped.
    3. If the new replica does not start, the old one is started again on its devices; if that fails too, it counts as
       dead, and recovery takes over.
    4. Recovery is told of each step, and does not treat a stop as a death.

    `tick` checks whether the replica is empty; the rest runs beside the event loop.

    Args:
        runtime: vLLM-Omni's `StageRuntime`.
        drain_seconds: how long a replica may take to become empty.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator, runtime: Any, drain_seconds: float) -> None:
        self._orchestrator, self._runtime, self._drain_seconds = orchestrator, runtime, drain_seconds
        self._pools = orchestrator.stage_pools
        self.devices = DeviceAssignment(runtime)
        self._draining: tuple[Replica, Any, float, asyncio.Future[MigrationOutcome]] | None = None
        self._task: asyncio.Task[MigrationOutcome] | None = None

    @property
    def busy(self) -> bool:
        return self._task is not None

    @property
    def is_draining(self) -> bool:
        """Return whether a replica is being drained."""
        return self._draining is not None

    # ---- requests for moves

    def hand_over(self, replica: Replica, stage_id: int) -> MigrationOutcome | asyncio.Task[MigrationOutcome]:
        """Give the devices of a replica to another stage; return the task that does it, or the reason for refusing."""
        if (why := self._refused(replica)) is not None:
            return why
        devices = self.devices.devices_of(replica)
        if not self.devices.fits(stage_id, devices):
            return MigrationOutcome.MISFIT
        return self._begin(self._replace(replica, self.devices.next_free(stage_id), devices), replica)

    def relocate(self, replica: Replica, devices: str | None) -> MigrationOutcome | asyncio.Task[MigrationOutcome]:
        """Move the replica to other devices, or replace it on its own ones.

        The last one of its stage stops only after the new one has started.
        """
        why = self._refused(replica)
        if not self.devices.fits(replica.stage, devices):
            why = MigrationOutcome.MISFIT
        if why is None:
            return self._begin(self._replace(replica, replica, devices), replica)
        return self._begin(self._start_before_stop(replica, devices), replica) if why is MigrationOutcome.LAST else why

    def give_up(self, replica: Replica) -> MigrationOutcome | asyncio.Task[MigrationOutcome]:
        """Stop the replica, and keep its devices as spare ones."""
        return self._refused(replica) or self._begin(self._stop(replica, spare=True), replica)

    def take_spare(self, stage_id: int) -> MigrationOutcome | asyncio.Task[MigrationOutcome]:
        """Start one more replica on spare devices."""
        devices = next((one for one in self.devices.spare if self.devices.fits(stage_id, one)), None)
        if self.busy:
            return MigrationOutcome.BUSY
        if not self.devices.spare or (devices is None and None not in self.devices.spare):
            return MigrationOutcome.GONE
        return self._begin(self._add(stage_id, devices))

    def idlest(self, stage_id: int) -> Replica | None:
        """Return the replica with the least in flight; None if the stage has none."""
        pool = self._pools[stage_id]
        held = [work.replica_id for work in pool.queue.running.values()]
        found = [Replica(stage_id, index) for index in pool.available_replica_ids()]
        return min(found, key=lambda one: (held.count(one.index), -one.index), default=None)

    def count(self, stage_id: int) -> int:
        """Return the number of replicas of a stage, including those that are to be restarted."""
        return len(self.devices.replicas(stage_id))

    # ---- progress of a move

    def tick(self) -> None:
        """Check whether the replica that is being drained is empty, dead or overdue."""
        if self._draining is None:
            return
        replica, client, until, found = self._draining
        pool = self._pools[replica.stage]
        if pool.clients[replica.index] is not client:
            outcome = MigrationOutcome.DIED
        elif not self._healthy(pool) - {replica.index}:
            outcome = MigrationOutcome.STAYED  # the others have died, or hang, meanwhile
        elif self._empty(replica):
            outcome = MigrationOutcome.MOVED
            pool.detach(replica.index)
        elif self._orchestrator.clock() >= until:
            outcome = MigrationOutcome.STAYED
        else:
            return
        self._draining = None
        if not found.done():
            found.set_result(outcome)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # ---- steps of a move

    def _refused(self, replica: Replica) -> MigrationOutcome | None:
        pool = self._pools[replica.stage]
        if self.busy:
            return MigrationOutcome.BUSY
        if pool.is_distributed:
            return MigrationOutcome.DISTRIBUTED
        serves = self._orchestrator.recovery.serves(replica)
        if not serves or replica.index not in pool.available_replica_ids() or replica not in self.devices:
            return MigrationOutcome.GONE
        return None if self._healthy(pool) - {replica.index} else MigrationOutcome.LAST

    @staticmethod
    def _healthy(pool: ScheduledPool) -> set[int]:
        """Return the replicas that serve and do not hang."""
        return set(pool.available_replica_ids()) - pool.suspected

    def _begin(self, move: Any, replica: Replica | None = None) -> asyncio.Task[MigrationOutcome]:
        """Begin a move of ``replica``; None: the replica is a new one."""
        name = "of a new replica" if replica is None else f"of stage {replica.stage} replica {replica.index}"
        self._task = asyncio.get_running_loop().create_task(move, name=f"move {name}")
        self._task.add_done_callback(self._on_done)
        return self._task

    def _on_done(self, task: asyncio.Task[MigrationOutcome]) -> None:
        self._task = self._draining = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("the %s failed; the replica may be out of service", task.get_name(), exc_info=error)
        elif task.result() is not MigrationOutcome.MOVED:
            logger.warning("the %s was not completed: %s", task.get_name(), task.result().value)

    async def _replace(self, replica: Replica, successor: Replica, devices: str | None) -> MigrationOutcome:
        """Stop ``replica`` and start ``successor`` on those devices; they may be the same replica."""
        outcome = await self._stop(replica)
        if outcome is not MigrationOutcome.MOVED:
            return outcome
        old_devices = self.devices.devices_of(replica)
        error = await self._start(successor, devices)
        if error is None:
            if successor != replica:
                self.devices.remove(replica)
            return MigrationOutcome.MOVED
        self._record(replica, IncidentKind.MOVE_FAILED, f"stage {successor.stage} on {devices}: {error}")
        again = await self._start(replica, old_devices)
        if again is None:
            return MigrationOutcome.BACK
        cause = f"it did not start again: {again}"
        self._pools[replica.stage].queue.handle(e.RestartFailed(replica.stage, replica.index, cause))
        self._record_alone(replica, IncidentKind.DIED, cause)
        return MigrationOutcome.LOST

    async def _start_before_stop(self, replica: Replica, devices: str | None) -> MigrationOutcome:
        """Start the new replica before the old one is stopped; if that fails, the old one stays."""
        successor = self.devices.next_free(replica.stage)
        error = await self._start(successor, devices)
        if error is not None:
            self._record(replica, IncidentKind.MOVE_FAILED, f"stage {successor.stage} on {devices}: {error}")
            return MigrationOutcome.BACK
        outcome = await self._stop(replica)
        if outcome is MigrationOutcome.MOVED:
            self.devices.remove(replica)
        elif outcome is MigrationOutcome.STAYED:
            await self._stop(successor, forget=True)
        return outcome

    async def _add(self, stage_id: int, devices: str | None) -> MigrationOutcome:
        self.devices.spare.remove(devices)
        replica = self.devices.next_free(stage_id)
        error = await self._start(replica, devices)
        if error is None:
            return MigrationOutcome.MOVED
        self._record(replica, IncidentKind.MOVE_FAILED, error)
        self.devices.spare.append(devices)
        return MigrationOutcome.BACK

    async def _stop(self, replica: Replica, spare: bool = False, forget: bool = False) -> MigrationOutcome:
        """Wait until the replica is empty, and stop its processes."""
        pool, loop = self._pools[replica.stage], asyncio.get_running_loop()
        client, found = pool.clients[replica.index], loop.create_future()
        if client is None:
            return MigrationOutcome.DIED  # recovery handles it
        pool.drain(replica.index)
        self._record_alone(replica, IncidentKind.DRAINING)
        self._draining = (replica, client, self._orchestrator.clock() + self._drain_seconds, found)
        outcome: MigrationOutcome = await found
        held = sum(bound == replica.index for bound in list(pool._request_bindings.values()))
        pool.drain(replica.index, on=False, cause=f"{outcome.value}, {held} requests")
        if outcome is MigrationOutcome.DIED:
            self._record(replica, IncidentKind.STAYED, "it died")
            return outcome
        if outcome is not MigrationOutcome.MOVED:
            self._record_alone(replica, IncidentKind.STAYED, f"{outcome.value}, {held} requests")
            if replica.index in pool.suspected:
                pool.suspect(replica.index, cause="it hangs")
            await self._orchestrator.release()
            return outcome
        pool.queue.replica_gone(replica.index)
        self._record_alone(replica, IncidentKind.MOVED_AWAY)
        self._orchestrator._remove_stage_replica_waiting(replica.stage, replica.index)
        try:
            if client.stage_type == "diffusion":  # its sockets belong to the event loop
                client.shutdown()
            else:
                await loop.run_in_executor(None, client.shutdown)
        except Exception:
            logger.exception(
                "stage %d replica %d raised an error while it was stopped; going on", replica.stage, replica.index
            )
        release_client(client)
        self._orchestrator.driver.board.memory(replica.stage, replica.index, None, 0)
        if spare:
            self.devices.spare.append(self.devices.devices_of(replica))
        if spare or forget:
            self.devices.remove(replica)
        return outcome

    async def _start(self, replica: Replica, devices: str | None) -> str | None:
        """Start a replica and put it into service; return the error, or None."""
        was = self.devices.devices_of(replica) if replica in self.devices else None
        known = replica in self.devices
        self.devices.assign(replica, devices)
        where = f"on {devices}"
        error = await put_into_service(self._orchestrator, self._runtime, replica, where)
        if error is None:
            self._orchestrator._orch_monitor.register_replica(replica.stage, replica.index)
            self._record_alone(replica, IncidentKind.MOVED_IN, where)
        elif known:
            self.devices.assign(replica, was)
        else:
            self.devices.remove(replica)
        return error

    def _empty(self, replica: Replica) -> bool:
        pool = self._pools[replica.stage]
        return (
            replica.index not in list(pool._request_bindings.values())
            and all(work.replica_id != replica.index for work in pool.queue.running.values())
            and not self._orchestrator.recovery.in_flight(replica)
        )

    def _record_alone(self, replica: Replica, kind: IncidentKind, cause: str = "") -> None:
        """Record an incident that recovery would record if it were on."""
        if not self._orchestrator.recovery.on:
            self._record(replica, kind, cause)

    def _record(self, replica: Replica, kind: IncidentKind, cause: str) -> None:
        self._orchestrator.driver.incident(Incident(self._orchestrator.clock(), replica, kind, cause))
