"""Restart a dead replica, and run its requests elsewhere, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni.engine.messages import ErrorMessage

from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery.events import FailReason, Replica
from vllm_omni_sched.monitor.recovery.remedies import RemedyAction, RemedyStep, ReplaceOutcome
from vllm_omni_sched.omni.stages.payloads import Payloads
from vllm_omni_sched.omni.stages.placement.replica_migrator import MigrationOutcome
from vllm_omni_sched.omni.stages.recovery.async_chunk_recovery import AsyncChunkRecovery, abort_run, in_thread
from vllm_omni_sched.omni.stages.recovery.handover import Handover, Handovers
from vllm_omni_sched.omni.stages.recovery.parking import Parking
from vllm_omni_sched.omni.stages.recovery.restart import put_into_service
from vllm_omni_sched.omni.stages.recovery.run_names import RunNames
from vllm_omni_sched.omni.stages.start.caches import sends_caches
from vllm_omni_sched.omni.stages.work import Work
from vllm_omni_sched.resource.pipeline.links import HERE

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)

HELD_SECONDS = 0.3  # how long to look for a payload that was not received


class RecoveryDriver:
    """Reports deaths to the pipeline core, and carries out what recovery decides there.

    The rules are those of `Recovery`; here is what only vLLM-Omni knows: which inputs are lost with a replica, what its
    engines still run, and how a replica is started.

    Args:
        runtime: vLLM-Omni's `StageRuntime`.
        names: names of runs; without recovery every request runs once, under its own name.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator, runtime: Any, payloads: Payloads, names: RunNames) -> None:
        self._orchestrator, self._runtime, self._payloads = orchestrator, runtime, payloads
        self._pools = orchestrator.stage_pools
        self._core = orchestrator.driver.core.recovery
        self.handovers = Handovers(pieces=orchestrator.async_chunk)
        self._forwarding: dict[str, asyncio.Future[None]] = {}  # requests on their way into the next stage
        self._examined: dict[Replica, list[Callable[[], None]]] = {}  # what waits until a death is examined
        self.parking = Parking(orchestrator, self._core, self.fail)
        self.names: RunNames | None = None
        self._async_chunk: AsyncChunkRecovery | None = None
        if self._core is not None:
            self.names = names
            self._wrap_clients(names)
            if orchestrator.async_chunk:
                self._async_chunk = AsyncChunkRecovery(orchestrator, payloads, self.names, self.handovers)

    def _wrap_clients(self, names: RunNames) -> None:
        """Make the clients of all stages, now and later, use these names of runs."""
        for pool in self._pools:
            pool.use_run_names(names)

    @property
    def on(self) -> bool:
        return self._core is not None

    # ---- events

    def started(self, work: Work) -> None:
        """Record that a work is sent to its replica."""
        self.handovers.runs_again(work.request_id, work.stage_id)
        if self._async_chunk is not None and self.names is not None and self.names.all_names(work.request_id):
            self._async_chunk.renew_sender(work)

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request waits for a replica to come back, for which another time limit applies."""
        parked = any(one.request_id == request_id for kept in self.parking.parked.values() for one in kept)
        return parked or (self._core is not None and self._core.is_waiting(request_id))

    def notes_outputs(self) -> bool:
        """Return whether outputs that do not end a work are of interest: they show that an input has arrived."""
        return len(self.handovers) > 0 and not self._orchestrator.async_chunk

    def on_output(
        self, stage_id: int, replica_id: int, owner: str, receivers: Sequence[str], *, finished: bool
    ) -> None:
        """Record an output of a replica for the work begun for ``owner``, and for all its receivers."""
        if len(self.handovers):
            self.handovers.on_first_output(stage_id, {owner, *receivers}, finished=finished)
        if finished and self._core is not None and self._sends_on(stage_id):
            states = self._orchestrator.request_states
            going_on = [name for name in receivers if name in states and states[name].final_stage_id > stage_id]
            if self._orchestrator.async_chunk:  # the stages exchange pieces under one name
                going_on = [owner] if going_on else []
            self.handovers.finished(stage_id, replica_id, owner, going_on)

    def _sends_on(self, stage_id: int) -> bool:
        """Return whether the output of a stage is sent to the next one past the front end."""
        if stage_id + 1 >= len(self._pools):
            return False
        pool, after = self._pools[stage_id], self._pools[stage_id + 1]
        return self._orchestrator.async_chunk or self._payloads.arrive_at(after) or sends_caches([pool])

    async def forwarding(self, request_id: str, forward: Coroutine[Any, Any, None]) -> None:
        """Take a request to the next stage; it cannot be recalled from there before it has arrived."""
        done = self._forwarding[request_id] = asyncio.get_running_loop().create_future()
        try:
            await forward
        finally:
            done.set_result(None)
            if self._forwarding.get(request_id) is done:
                del self._forwarding[request_id]

    def died(self, pool: ScheduledPool, replica_id: int, error: Exception) -> None:
        """Handle the death of a replica: take its work off it, examine what is lost, and let recovery decide."""
        assert self._core is not None
        replica = Replica(pool.stage_id, replica_id)
        logger.error("stage %d replica %d is dead; recovering its requests: %s", pool.stage_id, replica_id, error)
        if replica_id in pool.live_replica_ids():
            pool.evict_replica(replica_id)
        self._orchestrator._remove_stage_replica_waiting(pool.stage_id, replica_id)
        lost = pool.queue.lost(replica_id, str(error))
        if self._async_chunk is not None:
            unsent = self._async_chunk.unsent(pool, replica_id, self._core)
            for work in unsent:
                pool.queue.handle(e.Undelivered(pool.stage_id, work.request_id, replica_id))
            lost += unsent
        for work in lost:
            pool._request_bindings.pop(work.request_id, None)
            if pool.output_processor is not None:
                pool.output_processor.remove_request(work.runs_as)
            if self._async_chunk is not None:
                self._async_chunk.stop(work, self._core)
        self._fail_sessions(pool, replica_id, error)
        self._examined.setdefault(replica, [])
        self._orchestrator.spawn(self._examine_death(pool, replica, lost, str(error)))

    def when_examined(self, replica: Replica, do: Callable[[], None]) -> None:
        """Do something at once, or after a death of the replica that is being examined."""
        if replica in self._examined:
            self._examined[replica].append(do)
        else:
            do()

    async def _examine_death(self, pool: ScheduledPool, replica: Replica, lost: list[Work], cause: str) -> None:
        try:
            await self._examine(pool, replica, lost)
        except Exception:
            logger.exception(
                "stage %d replica %d is dead, and examining what is lost with it failed; its requests run again in "
                "that stage, and stall if it lacks their inputs",
                pool.stage_id,
                replica.index,
            )
        pool.queue.handle(e.DeathExamined(pool.stage_id, replica.index, cause))
        for do in self._examined.pop(replica, ()):
            do()

    def _end_runs(self, pool: ScheduledPool, replica_id: int, lost: list[Work]) -> dict[str, str]:
        """End the runs of a replica on another host: if its process lives, its outputs must not count any more.

        Returns:
            The names under which connectors know what was sent for these runs, by request.
        """
        ended: dict[str, str] = {}
        links = self._orchestrator.driver.context.links
        if self.names is None or self._core is None or self._async_chunk is not None:
            return ended  # all runs of these requests end in async-chunk mode
        if links.host(pool.stage_id, replica_id) == HERE:
            return ended  # its processes are dead
        for work in lost:
            name = work.request_id
            if name in self._orchestrator.request_states:
                ended[name] = self.names.external(name)
                works = self._core.works_of(name).values()
                self.names.start_new_run(name, {one.runs_as for one in works if isinstance(one, Work)})
        return ended

    async def _examine(self, pool: ScheduledPool, replica: Replica, lost: list[Work]) -> None:
        """Find out which inputs were lost with a replica, and report them."""
        sent_as = self._end_runs(pool, replica.index, lost)
        if pool.stage_id and not self._orchestrator.async_chunk and self._payloads.arrive_at(pool):
            names = [work.request_id for work in lost]
            take_back = partial(self._payloads.take_back, pool, names, HELD_SECONDS, sent_as)
            held = await asyncio.get_running_loop().run_in_executor(None, take_back)
            logger.warning(
                "stage %d replica %d is dead: %d of its %d requests still have their payloads; the others run again "
                "from an earlier stage",
                pool.stage_id,
                replica.index,
                len(held),
                len(names),
            )
            for work in lost:
                if work.request_id in held:
                    self._orchestrator.sharing.payload_sent(work.request_id, pool.stage_id)
                else:
                    pool.queue.handle(e.InputsLost(pool.stage_id, work.request_id))
        if not self._orchestrator.async_chunk:
            await self._recall_unsent(pool, replica)
        if sends_caches(self._pools[: pool.stage_id]):  # the dead replica has received them
            for work in lost:
                pool.queue.handle(e.InputsLost(pool.stage_id, work.request_id))
        for work in lost:
            if self._async_chunk is not None and not self._async_chunk.may_run_again(work.request_id):
                pool.queue.handle(e.CannotRunAgain(pool.stage_id, work.request_id, FailReason.COMPANIONS))

    async def _recall_unsent(self, pool: ScheduledPool, replica: Replica) -> None:
        """Recall requests from the next stage that wait for an output that the dead replica had not sent yet."""
        if not self.handovers.of_replica(pool.stage_id, replica.index):
            return
        after, held = self._pools[pool.stage_id + 1], set[str]()
        if self._payloads.arrive_at(after):
            open_ = self.handovers.of_replica(pool.stage_id, replica.index)
            names = sorted({name for one in open_ for name in (one.request_id, one.owner)})
            take_back = partial(self._payloads.take_back, after, names, HELD_SECONDS)
            held = await asyncio.get_running_loop().run_in_executor(None, take_back)
        while True:
            open_ = self.handovers.of_replica(pool.stage_id, replica.index)
            on_their_way = [self._forwarding[one.request_id] for one in open_ if one.request_id in self._forwarding]
            if not on_their_way:
                break
            await asyncio.wait(on_their_way)
        for one in open_:  # without a pause, so that none of them starts meanwhile
            if held.isdisjoint((one.request_id, one.owner)):
                self._recall(one, after)

    def remake_input(self, pool: ScheduledPool, request_id: str) -> None:
        """Make the input of a request again that waits in a stage for a payload that will not come."""
        if self._core is not None:
            self._orchestrator.spawn(self._remake_input(request_id, pool))

    async def _remake_input(self, request_id: str, after: ScheduledPool) -> None:
        while request_id in self._forwarding:
            await asyncio.wait([self._forwarding[request_id]])
        some = min(self._pools[after.stage_id - 1].live_replica_ids(), default=0)
        self._recall(Handover(request_id, after.stage_id - 1, some, request_id), after)

    def _recall(self, one: Handover, after: ScheduledPool) -> None:
        """Run a request again from the stage where its lost input can be made.

        The request is withdrawn from the next stage. The earlier run keeps its name, and the next one gets another, so
        that neither the engine nor a connector takes data of the first for a part of the second.
        """
        name, stage_id, orchestrator = one.request_id, one.stage_id, self._orchestrator
        if self._is_session(name):
            orchestrator.spawn(self.fail(name, after.stage_id, "its input was lost with a replica", FailReason.SESSION))
            return
        if self.names is None or self._core is None or not self._core.works_of(name):
            return
        works = {at: work for at, work in self._core.works_of(name).items() if isinstance(work, Work)}
        work = after.queue.running.get(name)
        if work is not None:
            self._stop_run(after, work)
        elif (work := after.queue.take_out(name)) is not None:
            orchestrator.sharing.stop_waiting(after, name)
        elif self.parking.forget(name):
            work = works[stage_id]
        else:
            return  # another request's work serves it there, or it has finished
        logger.warning("request %s runs again: its input for stage %d was lost with a replica", name, after.stage_id)
        if name in orchestrator.request_states:  # otherwise it runs again in the name of the present leader
            self.names.start_new_run(name, {each.runs_as for each in works.values()})
        self.handovers.forget(name)
        orchestrator.sharing.payload_lost(name, after.stage_id)
        for receiver in {name, *after.queue.receivers(name)}:
            state = orchestrator.request_states.get(receiver)
            if state is not None:
                state.finished_stage_ids.discard(stage_id)
                state.stage_submit_ts.pop(after.stage_id, None)
        after.queue.handle(e.Recalled(work, after.stage_id, one.replica_id))

    def _stop_run(self, pool: ScheduledPool, work: Work) -> None:
        """Withdraw a work from a live replica."""
        assert self.names is not None
        replica_id, run = work.replica_id, self.names.present(work.runs_as)
        pool.queue.withdraw(work)
        pool._request_bindings.pop(work.request_id, None)
        self._orchestrator.driver.board.aborted(pool.stage_id, replica_id, work.request_id)
        if pool.output_processor is not None:
            pool.output_processor.abort_requests([work.runs_as], internal=True)
        client = pool.clients[replica_id]
        if client is not None:
            self._orchestrator.spawn(abort_run(client, run))

    def _is_session(self, request_id: str) -> bool:
        """Return whether a request has state in replicas, so that it cannot run again."""
        state = self._orchestrator.request_states.get(request_id)
        return state is not None and (state.streaming.enabled or state.session_owned)

    def _fail_sessions(self, pool: ScheduledPool, replica_id: int, error: Exception) -> None:
        """Fail requests that bypass the queue and are not finished there: their state was in the dead replica."""
        orchestrator = self._orchestrator
        for request_id, bound in list(pool._request_bindings.items()):
            if bound != replica_id:
                continue
            pool._request_bindings.pop(request_id)
            state = orchestrator.request_states.get(request_id)
            direct = self._is_session(request_id) or orchestrator._cfg_tracker.is_companion(request_id)
            if state is not None and direct and pool.stage_id not in state.finished_stage_ids:
                orchestrator.spawn(self.fail(request_id, pool.stage_id, str(error), FailReason.SESSION))

    # ---- actions of the core

    def do(self, action: e.Action) -> None:
        """Carry out an action that follows from a death, or from the end of a request."""
        match action:
            case e.RunsAgain(Work() as work, leader, receivers, stages):
                if not self._restarts_together(work):
                    self._runs_again(work, leader, receivers, stages)
                self._orchestrator.spawn(self._send())
            case e.GivenUp(Work() as work, receivers, reason):
                why = f"the replica that ran it died ({reason.value})"
                if work.request_id in self._pools[work.stage_id].queue.waiting or reason in _UNSERVED:
                    why = self.outage(work.stage_id, reason)
                self._orchestrator.spawn(self._give_up(work.stage_id, receivers, why, reason))
            case e.Unserved(stage_id, until, reason):
                self.parking.fail(stage_id, until, self.outage(stage_id, reason), reason)
            case e.Restart(stage_id, replica_id):
                self._orchestrator.spawn(self._restart(Replica(stage_id, replica_id)))
            case e.Forgotten(request_id, works):
                self._forget(request_id, {work.stage_id: work for work in works})
            case _:
                pass

    def outage(self, stage_id: int, reason: FailReason) -> str:
        """Return why requests fail that need a stage without a replica, as operators and clients are told."""
        assert self._core is not None
        why = self._core.policy.outage(stage_id, self._orchestrator.clock())
        return f"{_UNSERVED[reason]}: {why}" if why else _UNSERVED[reason]

    def _restarts_together(self, work: Work) -> bool:
        """Return whether a work runs again with others that exchange chunks with it (`AsyncChunkRecovery`)."""
        return self._async_chunk is not None

    def _runs_again(self, work: Work, leader: str, receivers: Sequence[str], stages: Sequence[int]) -> None:
        """Let the outputs of stages that run again count once more, where they are new."""
        orchestrator = self._orchestrator
        for stage_id in {work.stage_id, *stages}:
            its = receivers if stage_id == work.stage_id else self._pools[stage_id].queue.receivers(leader)
            orchestrator.deduplicator.runs_again(stage_id, its)
        if stages == (work.stage_id,):
            return  # it is on its way to another replica
        state = orchestrator.request_states.get(leader)
        for stage_id in stages:
            self.handovers.runs_again(leader, stage_id)
            if state is not None:
                state.finished_stage_ids.discard(stage_id)
        if state is not None:
            self._goes_through_again(state, stages)

    def _goes_through_again(self, state: Any, stages: Sequence[int]) -> None:
        """Let a request be sent again to the stages that follow the first one."""
        for stage_id in stages[1:]:
            state.stage_submit_ts.pop(stage_id, None)

    async def _send(self) -> None:
        """Send what starts, first stage first: in async-chunk mode each has to know where the one before runs."""
        for pool in self._pools:
            await pool.queue.send()

    def _forget(self, request_id: str, works: dict[int, StageWork]) -> None:
        """Forget a request that has left."""
        self.handovers.forget(request_id)
        self.parking.forget(request_id)
        if self._async_chunk is not None:
            self._async_chunk.forget(request_id, works)
        elif self.names is not None:
            self._discard_payloads(self.names.all_names(request_id), works)
        if self.names is not None:
            self.names.forget(request_id)

    def _discard_payloads(self, names: Sequence[str], works: Mapping[int, StageWork]) -> None:
        """Drop what was sent for runs of a request that has left and not received, or was begun by a killed sender."""
        for pool in self._pools if names else ():
            if pool.stage_id - 1 in works and self._payloads.arrive_at(pool):
                discard = partial(self._payloads.discard, pool, names, 1)
                self._orchestrator.spawn(in_thread(discard))

    async def _give_up(self, stage_id: int, request_ids: Sequence[str], why: str, reason: FailReason) -> None:
        for request_id in request_ids:
            await self.fail(request_id, stage_id, why, reason)

    async def fail(self, request_id: str, stage_id: int, why: str, reason: FailReason) -> None:
        """End a request with an error."""
        orchestrator = self._orchestrator
        orchestrator.driver.failed(stage_id, request_id, reason, why)
        await orchestrator.output_async_queue.put(
            ErrorMessage(error=f"Stage-{stage_id}: {why}", fatal=True, request_id=request_id, stage_id=stage_id)
        )
        companions = orchestrator._cfg_tracker.cleanup_parent(request_id)
        await orchestrator._cleanup_request_ids([request_id, *companions], abort=True, release_owners=True)

    async def _restart(self, replica: Replica) -> None:
        error = await put_into_service(self._orchestrator, self._runtime, replica)
        if error is not None:
            self._pools[replica.stage].queue.handle(e.RestartFailed(replica.stage, replica.index, error))

    # ---- anomalies of replicas that serve

    def remedy(self, decision: RemedyAction) -> None:
        """Replace or end a replica that has an anomaly."""
        match decision.step:
            case RemedyStep.REPLACE:
                self._replace(decision.replica)
            case RemedyStep.TERMINATE:
                replica = decision.replica
                self._orchestrator.hang_detector.terminate(self._pools[replica.stage], replica.index)
            case _:
                pass  # it is left alone

    def _replace(self, replica: Replica) -> None:
        """Stop a replica when it is empty, and start it again on its own devices; then report how that ended."""
        migrator = self._orchestrator.migrator
        begun: MigrationOutcome | asyncio.Task[MigrationOutcome] = MigrationOutcome.GONE
        if replica in migrator.devices:
            begun = migrator.relocate(replica, migrator.devices.devices_of(replica))
        if isinstance(begun, MigrationOutcome):
            self._replaced(replica, begun)
        else:
            begun.add_done_callback(partial(self._on_moved, replica))

    def _on_moved(self, replica: Replica, task: asyncio.Task[MigrationOutcome]) -> None:
        if not task.cancelled():
            self._replaced(replica, MigrationOutcome.LOST if task.exception() is not None else task.result())

    def _replaced(self, replica: Replica, outcome: MigrationOutcome) -> None:
        self._pools[replica.stage].queue.handle(e.ReplaceEnded(replica.stage, replica.index, _ENDS[outcome]))

    # ---- replicas that move

    def serves(self, replica: Replica) -> bool:
        """Return whether the replica serves, as far as recovery knows."""
        return self._core is None or self._core.policy.serves(replica)

    def in_flight(self, replica: Replica) -> bool:
        """Return whether requests are on the replica or on their way to it."""
        return self._core is not None and bool(self._core.policy.in_flight(replica))


_ENDS = {
    MigrationOutcome.MOVED: ReplaceOutcome.REPLACED,
    MigrationOutcome.BUSY: ReplaceOutcome.BUSY,
    MigrationOutcome.STAYED: ReplaceOutcome.NOT_EMPTY,
    MigrationOutcome.DIED: ReplaceOutcome.DIED,
    MigrationOutcome.BACK: ReplaceOutcome.NOT_STARTED,
    MigrationOutcome.LOST: ReplaceOutcome.NOT_STARTED,
    MigrationOutcome.GONE: ReplaceOutcome.UNABLE,
    MigrationOutcome.LAST: ReplaceOutcome.UNABLE,
    MigrationOutcome.MISFIT: ReplaceOutcome.UNABLE,
    MigrationOutcome.DISTRIBUTED: ReplaceOutcome.UNABLE,
}

_UNSERVED = {
    FailReason.NO_REPLICA: "it has no live replica",
    FailReason.WAITED: "it has had no replica for longer than runtime.recovery.max_wait_seconds",
}
