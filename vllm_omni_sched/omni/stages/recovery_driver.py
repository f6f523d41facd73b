"""Restart a dead replica, and run its requests elsewhere, once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni.engine.messages import ErrorMessage

from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery import events
from vllm_omni_sched.monitor.recovery.events import FailReason, Replica
from vllm_omni_sched.omni.stages.async_chunk_recovery import AsyncChunkRecovery, abort_run
from vllm_omni_sched.omni.stages.caches import sends_caches
from vllm_omni_sched.omni.stages.handover import Handover, Handovers
from vllm_omni_sched.omni.stages.parking import Parking
from vllm_omni_sched.omni.stages.payloads import Payloads
from vllm_omni_sched.omni.stages.run_names import RunNames
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)

HELD_SECONDS = 0.3  # how long to look for a payload that was not received


class RecoveryDriver:
    """Carries out the actions of the recovery policy.

    Args:
        runtime: vLLM-Omni's `StageRuntime`.
        names: names of runs; without recovery every request runs once, under its own name.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator, runtime: Any, payloads: Payloads, names: RunNames) -> None:
        self._orchestrator, self._runtime, self._payloads = orchestrator, runtime, payloads
        self._pools = orchestrator.stage_pools
        self._policy = orchestrator.driver.recovery_policy(orchestrator.stage_pools)
        self._works: dict[str, dict[int, Work]] = {}  # of present requests, by stage
        self._lost: dict[str, Work] = {}  # works of dead replicas, until they have a place
        self.handovers = Handovers(pieces=orchestrator.async_chunk)
        self._forwarding: dict[str, asyncio.Future[None]] = {}  # requests on their way into the next stage
        self.parking = Parking(orchestrator, self._policy, self.fail)
        self.names: RunNames | None = None
        self._async_chunk: AsyncChunkRecovery | None = None
        if self._policy is not None:
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
        return self._policy is not None

    # ---- events

    def started(self, work: Work) -> None:
        """Record that a work is sent to its replica."""
        self.handovers.runs_again(work.request_id, work.stage_id)
        if self._policy is None or work.redispatched:
            work.redispatched = False
            return
        self._works.setdefault(work.request_id, {})[work.stage_id] = work
        self._dispatched(work, work.replica_id)

    def _dispatched(self, work: Work, replica_id: int) -> None:
        replica = Replica(work.stage_id, replica_id)
        try:
            self._handle(events.Dispatched(self._flight_name(work), replica, work.request_id))
        except ValueError:
            logger.exception("recovery cannot track request %s", work.request_id)

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request waits for a replica to come back, for which another time limit applies."""
        parked = any(one.request_id == request_id for kept in self.parking.parked.values() for one in kept)
        return parked or any(work.request_id == request_id for work in self._lost.values())

    def works_of(self, request_id: str) -> dict[int, Work] | None:
        """Return the works of a present request by stage; None if there are none."""
        return self._works.get(request_id)

    def track(self, work: Work) -> None:
        """Record a work that another one does; it may have to run by itself later."""
        if self._policy is not None:
            self._works.setdefault(work.request_id, {})[work.stage_id] = work

    def ended(self, work: Work) -> None:
        """Record that a work has ended without an error."""
        if self._policy is not None:
            name = self._flight_name(work)
            self._handle(events.Finished(name, self._policy.attempt(name)))

    def on_output(
        self, stage_id: int, replica_id: int, owner: str, receivers: Sequence[str], *, finished: bool
    ) -> None:
        """Record an output of a replica for the work begun for ``owner``, and for all its receivers."""
        self.handovers.on_first_output(stage_id, {owner, *receivers}, finished=finished)
        if finished and self._policy is not None and self._sends_on(stage_id):
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

    def forget(self, request_id: str) -> None:
        """Forget a request that has left."""
        if not any(pool.queue.works_for_others(request_id) for pool in self._pools):
            self.handovers.forget(request_id)
        if self._policy is None or any(pool.queue.works_for_others(request_id) for pool in self._pools):
            return
        works = self._works.pop(request_id, {})
        for work in works.values():
            self._handle(events.Aborted(self._flight_name(work)))
            self._lost.pop(self._flight_name(work), None)
        self.parking.forget(request_id)
        if self._async_chunk is not None:
            self._async_chunk.forget(request_id, works)
        if self.names is not None:
            self.names.forget(request_id)
        if self._async_chunk is not None:
            for name in list(self._works):  # works whose last user this request was, of requests that had left before
                if name not in self._orchestrator.request_states:
                    self.forget(name)

    async def died(self, pool: ScheduledPool, replica_id: int, error: Exception) -> bool:
        """Handle the death of a replica; return False if recovery is off and it was not handled."""
        if self._policy is None:
            return False
        replica = Replica(pool.stage_id, replica_id)
        logger.error("stage %d replica %d is dead; recovering its requests: %s", pool.stage_id, replica_id, error)
        if replica_id in pool.live_replica_ids():
            pool.evict_replica(replica_id)
        self._orchestrator._remove_stage_replica_waiting(pool.stage_id, replica_id)
        lost = pool.queue.lost(replica_id)
        if self._async_chunk is not None:
            for work in self._async_chunk.unsent(pool, replica_id, self._works):
                self._dispatched(work, replica_id)
                work.reset()
                lost.append(work)
        for work in lost:
            self._lost[self._flight_name(work)] = work
            pool._request_bindings.pop(work.request_id, None)
            if pool.output_processor is not None:
                pool.output_processor.remove_request(work.runs_as)
            if self._async_chunk is not None:
                for taken in self._async_chunk.stop(work, self._works[work.request_id]):
                    self._handle(events.Aborted(self._flight_name(taken)))
        self._fail_sessions(pool, replica_id, error)
        self._handle(events.Suspected(replica, str(error)))  # no request is sent there while payloads are looked for
        self._orchestrator.spawn(self._after(pool, replica, lost, str(error)))
        return True

    async def _after(self, pool: ScheduledPool, replica: Replica, lost: list[Work], cause: str) -> None:
        if pool.stage_id and not self._orchestrator.async_chunk and self._payloads.arrive_at(pool):
            names = [work.request_id for work in lost]
            take_back = partial(self._payloads.take_back, pool, names, HELD_SECONDS)
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
                    for stage_id in range(pool.stage_id):
                        self._handle(events.OutputLost(self._flight_name(work), stage_id))
        if not self._orchestrator.async_chunk:
            await self._recall_unsent(pool, replica)
        if sends_caches(self._pools[: pool.stage_id]):  # the dead replica has received them
            for work in lost:
                for stage_id in range(pool.stage_id):
                    self._handle(events.OutputLost(self._flight_name(work), stage_id))
        for work in lost:
            if self._async_chunk is not None and not self._async_chunk.may_run_again(work.request_id):
                self._handle(events.Aborted(self._flight_name(work)))
                await self._give_up(work, FailReason.COMPANIONS)
        self._handle(events.Died(replica, cause))

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
        if self._policy is not None:
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
        works, names, policy = self._works.get(name), self.names, self._policy
        if works is None or names is None or policy is None:
            return
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
            names.start_new_run(name, {each.runs_as for each in works.values()})
        self.handovers.forget(name)
        orchestrator.sharing.payload_lost(name, after.stage_id)
        for receiver in {name, *after.queue.receivers(name)}:
            orchestrator.driver.waive_credits(receiver, orchestrator.clock())
            state = orchestrator.request_states.get(receiver)
            if state is not None:
                state.finished_stage_ids.discard(stage_id)
                state.stage_submit_ts.pop(after.stage_id, None)
        if not policy.attempt(name):  # another request's work has served it so far
            self._dispatched(works[stage_id], one.replica_id)
        for earlier in range(after.stage_id):
            self._handle(events.OutputLost(name, earlier))
        work.reset()
        self._lost[self._flight_name(work)] = work
        self._handle(events.Recalled(name))

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

    # ---- actions of the policy

    def _handle(self, event: Any) -> None:
        assert self._policy is not None  # without it, no caller has anything to report
        orchestrator = self._orchestrator
        for action in self._policy.on_event(event, orchestrator.clock()):
            match action:
                case events.Restart(replica):
                    orchestrator.spawn(self._restart(replica))
                case events.Redispatch(name, replica, _, stages):
                    orchestrator.spawn(self._redispatch(name, replica, stages))
                case events.Fail(name, reason):
                    work = self._lost.pop(name, None)
                    if work is not None:
                        orchestrator.spawn(self._give_up(work, reason))
                case events.Record(incident):
                    orchestrator.driver.incident(incident)

    def tick(self) -> None:
        if self._policy is None:
            return
        self._handle(events.Tick())
        self.parking.tick(self._orchestrator.clock())

    async def _redispatch(self, name: str, replica: Replica, stages: tuple[int, ...]) -> None:
        work = self._lost.pop(name, None)
        if work is None:
            return
        if self._async_chunk is not None:
            if work.request_id in self._works:
                await self._async_chunk.resume(work, replica.index, self._works[work.request_id])
            return
        orchestrator = self._orchestrator
        receivers = orchestrator.stage_pools[work.stage_id].queue.receivers(work.request_id)
        for receiver in receivers:
            orchestrator.deduplicator.runs_again(receiver, work.stage_id)
        if stages[0] != work.stage_id:
            for receiver in receivers:
                orchestrator.driver.waive_credits(receiver, orchestrator.clock())
            work = self._rewind(work, stages[0], receivers[0])
            if work.request_id == name:
                work.redispatched = True
            else:
                self._handle(events.Aborted(name))  # its request has left; the present leader runs under its own name
                self._works.pop(name, None)
                self.handovers.forget(name)
                if self.names is not None:
                    self.names.forget(name)
        else:
            work.redispatched = True
        await orchestrator.stage_pools[replica.stage].queue.place(work, replica.index)

    def _rewind(self, work: Work, stage_id: int, leader: str) -> Work:
        """Return the work at an earlier stage, to be done once more.

        It is done in the name of the present leader. From there it comes back to the interrupted stage, where
        its followers still follow it.
        """
        orchestrator = self._orchestrator
        orchestrator.stage_pools[work.stage_id].queue.rename(work.request_id)
        state = orchestrator.request_states.get(leader)
        for later in range(stage_id, work.stage_id + 1):
            if state is not None:
                state.finished_stage_ids.discard(later)
                if later > stage_id:
                    state.stage_submit_ts.pop(later, None)
            if later < work.stage_id:
                orchestrator.deduplicator.runs_again(leader, later)
        earlier = self._works[leader][stage_id]
        earlier.reset()
        return earlier

    async def _give_up(self, work: Work, reason: FailReason) -> None:
        for receiver in self._orchestrator.stage_pools[work.stage_id].queue.receivers(work.request_id):
            await self.fail(receiver, work.stage_id, f"the replica that ran it died ({reason.value})", reason)

    async def fail(self, request_id: str, stage_id: int, why: str, reason: FailReason) -> None:
        """End a request with an error."""
        orchestrator = self._orchestrator
        orchestrator.driver.board.given_up(stage_id, reason.value)
        await orchestrator.output_async_queue.put(
            ErrorMessage(error=f"Stage-{stage_id}: {why}", fatal=True, request_id=request_id, stage_id=stage_id)
        )
        companions = orchestrator._cfg_tracker.cleanup_parent(request_id)
        await orchestrator._cleanup_request_ids([request_id, *companions], abort=True, release_owners=True)

    async def _restart(self, replica: Replica) -> None:
        from vllm_omni_sched.omni.stages.restart import start_replica

        pool = self._orchestrator.stage_pools[replica.stage]
        logger.warning("restarting stage %d replica %d", replica.stage, replica.index)
        loop = asyncio.get_running_loop()
        try:
            start = partial(
                start_replica, self._runtime, replica.stage, replica.index, self._orchestrator.migrator.devices
            )
            client = await loop.run_in_executor(None, start)
        except Exception as error:
            logger.exception("restarting stage %d replica %d failed", replica.stage, replica.index)
            self._handle(events.RestartFailed(replica, str(error)))
            return
        await self._orchestrator.forget_items(replica.stage)
        self._orchestrator.driver.board.restarted(replica.stage, replica.index)
        pool.attach(replica.index, client)
        self._orchestrator.migrator.stopped.discard(replica)
        logger.warning("stage %d replica %d was restarted and serves again", replica.stage, replica.index)
        self._handle(events.Restarted(replica))
        self.parking.unpark(replica.stage)
        await self._orchestrator.release()

    # ---- replicas that move

    def report(self, event: events.Event) -> None:
        """Tell recovery of a planned change of a replica."""
        if self._policy is not None:
            self._handle(event)

    def serves(self, replica: Replica) -> bool:
        """Return whether the replica serves, as far as recovery knows."""
        return self._policy is None or self._policy.serves(replica)

    def in_flight(self, replica: Replica) -> bool:
        """Return whether requests are on the replica or on their way to it."""
        return self._policy is not None and bool(self._policy.in_flight(replica))

    def _flight_name(self, work: Work) -> str:
        """Return the name of a request in flight: in async-chunk mode it is in all stages at once."""
        return f"{work.request_id}@{work.stage_id}" if self._orchestrator.async_chunk else work.request_id

    # ---- replicas that do not answer

    def suspect(self, pool: ScheduledPool, replica_id: int, why: str) -> None:
        """Report a replica that does not answer: no request is moved there until `answers` is called or it has died."""
        if self._policy is not None:
            self._handle(events.Suspected(Replica(pool.stage_id, replica_id), why))

    def clear_suspicion(self, pool: ScheduledPool, replica_id: int) -> None:
        """Report that a suspected replica answers again."""
        if self._policy is not None:
            self._handle(events.Cleared(Replica(pool.stage_id, replica_id)))
