"""Move replicas to another stage or to other devices while requests run."""

from __future__ import annotations

import asyncio
from enum import Enum
from functools import partial
from typing import Any

from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery import events
from vllm_omni_sched.monitor.recovery.events import Incident, IncidentKind, Replica
from vllm_omni_sched.omni.stages.places import Places
from vllm_omni_sched.omni.stages.processes import let_go
from vllm_omni_sched.omni.stages.restart import start_replica

logger = get_logger(__name__)


class Outcome(str, Enum):
    """Outcome of a move."""

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


class Moves:
    """Stops replicas and starts others in their places, one move at a time.

    1. A replica that is to leave gets no new work. It is stopped when none of the requests that it had are in the
       pipeline any more; that is later than necessary for itself, but later stages may still fetch data from it. A
       replica that is not empty within ``drain_seconds`` stays.
    2. The last replica of a stage is never stopped.
    3. If the new replica does not start, the old one is started again in its place; if that fails too, it counts as
       dead, and recovery takes over.
    4. Recovery is told of each step, and does not treat a stop as a death.

    `tick` checks whether the replica is empty; the rest runs beside the event loop.

    Args:
        orchestrator: our orchestrator.
        runtime: vLLM-Omni's `StageRuntime`.
        drain_seconds: how long a replica may take to become empty.
    """

    def __init__(self, orchestrator: Any, runtime: Any, drain_seconds: float) -> None:
        self._orchestrator, self._runtime, self._drain_seconds = orchestrator, runtime, drain_seconds
        self._pools: list[Any] = orchestrator.stage_pools
        self.places = Places(runtime)
        self.away: set[Replica] = set()  # stopped, or being stopped, by us
        self._draining: tuple[Replica, Any, float, asyncio.Future[Outcome]] | None = None
        self._task: asyncio.Task[Outcome] | None = None

    @property
    def busy(self) -> bool:
        return self._task is not None

    @property
    def waits(self) -> bool:
        """Return whether a replica is being drained."""
        return self._draining is not None

    # ---- what is asked for

    def hand_over(self, replica: Replica, stage_id: int) -> Outcome | asyncio.Task[Outcome]:
        """Give the replica's place to another stage: return the task that does it, or the reason for refusing."""
        if (why := self._refused(replica)) is not None:
            return why
        place = self.places.of(replica)
        if not self.places.fits(stage_id, place):
            return Outcome.MISFIT
        return self._begin(self._replace(replica, self.places.vacant(stage_id), place))

    def relocate(self, replica: Replica, devices: str) -> Outcome | asyncio.Task[Outcome]:
        """Move the replica to other devices. The last one of its stage stops only after the new one has started."""
        why = self._refused(replica)
        if not self.places.fits(replica.stage, devices):
            why = Outcome.MISFIT
        if why is None:
            return self._begin(self._replace(replica, replica, devices))
        return self._begin(self._ahead(replica, devices)) if why is Outcome.LAST else why

    def give_up(self, replica: Replica) -> Outcome | asyncio.Task[Outcome]:
        """Stop the replica, and make its place spare."""
        return self._refused(replica) or self._begin(self._stop(replica, spare=True))

    def take_spare(self, stage_id: int) -> Outcome | asyncio.Task[Outcome]:
        """Start one more replica in a spare place."""
        place = next((one for one in self.places.spare if self.places.fits(stage_id, one)), None)
        if self.busy:
            return Outcome.BUSY
        if not self.places.spare or (place is None and None not in self.places.spare):
            return Outcome.GONE
        return self._begin(self._add(stage_id, place))

    def idlest(self, stage_id: int) -> Replica | None:
        """Return the replica with the least in flight; None if the stage has none."""
        pool = self._pools[stage_id]
        held = [work.replica_id for work in pool.queue.running.values()]
        found = [Replica(stage_id, index) for index in pool.available_replica_ids()]
        return min(found, key=lambda one: (held.count(one.index), -one.index), default=None)

    def count(self, stage_id: int) -> int:
        """Return the number of replicas of a stage, including those that are to be restarted."""
        return len(self.places.replicas(stage_id))

    # ---- what happens meanwhile

    def tick(self) -> None:
        """Check whether the replica that is being drained is empty, dead or overdue."""
        if self._draining is None:
            return
        replica, client, until, found = self._draining
        pool = self._pools[replica.stage]
        if pool.clients[replica.index] is not client:
            outcome = Outcome.DIED
        elif not self._well(pool) - {replica.index}:
            outcome = Outcome.STAYED  # the others have died, or hang, meanwhile
        elif self._empty(replica):
            outcome = Outcome.MOVED
            pool.detach(replica.index)
            self.away.add(replica)
        elif self._orchestrator.clock() >= until:
            outcome = Outcome.STAYED
        else:
            return
        self._draining = None
        if not found.done():
            found.set_result(outcome)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # ---- how

    def _refused(self, replica: Replica) -> Outcome | None:
        pool = self._pools[replica.stage]
        if self.busy:
            return Outcome.BUSY
        if pool.is_distributed:
            return Outcome.DISTRIBUTED
        well = self._orchestrator.repair.well(replica)
        if not well or replica.index not in pool.available_replica_ids() or replica not in self.places:
            return Outcome.GONE
        return None if self._well(pool) - {replica.index} else Outcome.LAST

    @staticmethod
    def _well(pool: Any) -> set[int]:
        """Return the replicas that serve and do not hang."""
        return set(pool.available_replica_ids()) - pool.suspected

    def _begin(self, work: Any) -> asyncio.Task[Outcome]:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._over)
        return self._task

    def _over(self, task: asyncio.Task[Outcome]) -> None:
        self._task = self._draining = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("moving a replica failed with an error", exc_info=error)
        elif task.result() is not Outcome.MOVED:
            logger.warning("moving a replica was not completed: %s", task.result().value)

    async def _replace(self, replica: Replica, heir: Replica, place: str | None) -> Outcome:
        """Stop ``replica`` and start ``heir`` on those devices; they may be the same replica."""
        outcome = await self._stop(replica)
        if outcome is not Outcome.MOVED:
            return outcome
        before = self.places.of(replica)
        error = await self._start(heir, place)
        if error is None:
            if heir != replica:
                self.places.clear(replica)
            return Outcome.MOVED
        self._record(replica, IncidentKind.MOVE_FAILED, f"stage {heir.stage} on {place}: {error}")
        again = await self._start(replica, before)
        if again is None:
            return Outcome.BACK
        self.away.discard(replica)
        self._tell(events.Joined(replica), IncidentKind.MOVED_IN)
        self._tell(events.Died(replica, f"it did not start again: {again}"), IncidentKind.DIED)
        return Outcome.LOST

    async def _ahead(self, replica: Replica, place: str) -> Outcome:
        """Start the new replica before the old one is stopped; if that fails, the old one stays."""
        heir = self.places.vacant(replica.stage)
        error = await self._start(heir, place)
        if error is not None:
            self._record(replica, IncidentKind.MOVE_FAILED, f"stage {heir.stage} on {place}: {error}")
            return Outcome.BACK
        outcome = await self._stop(replica)
        if outcome is Outcome.MOVED:
            self.places.clear(replica)
        elif outcome is Outcome.STAYED:
            await self._stop(heir, forget=True)
        return outcome

    async def _add(self, stage_id: int, place: str | None) -> Outcome:
        self.places.spare.remove(place)
        replica = self.places.vacant(stage_id)
        error = await self._start(replica, place)
        if error is None:
            return Outcome.MOVED
        self._record(replica, IncidentKind.MOVE_FAILED, error)
        self.places.spare.append(place)
        return Outcome.BACK

    async def _stop(self, replica: Replica, spare: bool = False, forget: bool = False) -> Outcome:
        """Wait until the replica is empty, and stop its processes."""
        pool, loop = self._pools[replica.stage], asyncio.get_running_loop()
        client, found = pool.clients[replica.index], loop.create_future()
        if client is None:
            return Outcome.DIED  # recovery handles it
        pool.drain(replica.index)
        self._tell(events.Draining(replica), IncidentKind.DRAINING)
        self._draining = (replica, client, self._orchestrator.clock() + self._drain_seconds, found)
        outcome: Outcome = await found
        pool.drain(replica.index, on=False)
        if outcome is Outcome.DIED:
            self._record(replica, IncidentKind.STAYED, "it died")
            return outcome
        if outcome is not Outcome.MOVED:
            held = sum(bound == replica.index for bound in list(pool._request_bindings.values()))
            self._tell(events.Stays(replica, f"{outcome.value}, {held} requests"), IncidentKind.STAYED)
            if replica.index in pool.suspected:
                self._orchestrator.repair.suspect(pool, replica.index, "it hangs")
            await self._orchestrator.release()
            return outcome
        self._tell(events.Left(replica), IncidentKind.MOVED_AWAY)
        pool.queue.lost(replica.index)
        self._orchestrator._remove_stage_replica_waiting(replica.stage, replica.index)
        try:
            if client.stage_type == "diffusion":  # its sockets belong to the event loop
                client.shutdown()
            else:
                await loop.run_in_executor(None, client.shutdown)
        except Exception:
            logger.exception("stage %d replica %d raised an error while it was stopped", replica.stage, replica.index)
        let_go(client)
        self._orchestrator.policies.board.memory(replica.stage, replica.index, None, 0)
        if spare:
            self.places.spare.append(self.places.of(replica))
        if spare or forget:
            self.places.clear(replica)
        return outcome

    async def _start(self, replica: Replica, place: str | None) -> str | None:
        """Start a replica and put it into service; return the error, or None."""
        pool, orchestrator = self._pools[replica.stage], self._orchestrator
        was = self.places.of(replica) if replica in self.places else None
        known = replica in self.places
        self.places.put(replica, place)
        start = partial(start_replica, self._runtime, replica.stage, replica.index, self.places)
        try:
            client = await asyncio.get_running_loop().run_in_executor(None, start)
        except Exception as error:
            logger.exception("stage %d replica %d did not start on %s", replica.stage, replica.index, place)
            if known:
                self.places.put(replica, was)
            else:
                self.places.clear(replica)
            return str(error) or type(error).__name__
        await orchestrator.forget_items(replica.stage)
        pool.attach(replica.index, client)
        self.away.discard(replica)
        orchestrator._orch_monitor.register_replica(replica.stage, replica.index)
        self._tell(events.Joined(replica, f"on {place}"), IncidentKind.MOVED_IN)
        orchestrator.repair.parking.unpark(replica.stage)
        await orchestrator.release()
        return None

    def _empty(self, replica: Replica) -> bool:
        pool = self._pools[replica.stage]
        return (
            replica.index not in list(pool._request_bindings.values())
            and all(work.replica_id != replica.index for work in pool.queue.running.values())
            and not self._orchestrator.repair.in_flight(replica)
        )

    def _tell(self, event: Any, kind: IncidentKind) -> None:
        """Tell recovery, which records the event; without recovery, record it here."""
        if self._orchestrator.repair.on:
            self._orchestrator.repair.tell(event)
        else:
            self._record(event.replica, kind, getattr(event, "cause", ""))

    def _record(self, replica: Replica, kind: IncidentKind, cause: str) -> None:
        self._orchestrator.policies.incident(Incident(self._orchestrator.clock(), replica, kind, cause))
