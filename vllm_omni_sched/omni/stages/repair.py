"""After a death: the replica is started again, and its requests run elsewhere, once."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from vllm_omni.engine.messages import ErrorMessage

from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery import events
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.omni.stages.caches import sends_caches
from vllm_omni_sched.omni.stages.parking import Parking
from vllm_omni_sched.omni.stages.payloads import Payloads
from vllm_omni_sched.omni.stages.together import Together
from vllm_omni_sched.omni.stages.work import UNPLACED, Work

logger = get_logger(__name__)

HELD_SECONDS = 0.3  # how long a payload that nobody has got is looked for


class Repair:
    """Does what the policy of recovery asks for.

    Args:
        orchestrator: ours.
        runtime: vLLM-Omni's `StageRuntime`.
    """

    def __init__(self, orchestrator: Any, runtime: Any, payloads: Payloads) -> None:
        self._orchestrator, self._runtime, self._payloads = orchestrator, runtime, payloads
        self._pools: list[Any] = orchestrator.stage_pools
        self._policy = orchestrator.policies.recovery(orchestrator.stage_pools)
        self._works: dict[str, dict[int, Work]] = {}  # of requests that are here, by stage
        self._lost: dict[str, Work] = {}  # works of dead replicas, until they have a place
        self.parking = Parking(orchestrator, self._policy, self._fail)
        self._together: Together | None = None
        if self._policy is not None and orchestrator.async_chunk:
            self._together = Together(orchestrator, payloads)

    @property
    def on(self) -> bool:
        return self._policy is not None

    # ---- what happens

    def started(self, work: Work) -> None:
        """A work goes to its replica."""
        if self._policy is None or work.again:
            work.again = False
            return
        self._works.setdefault(work.request_id, {})[work.stage_id] = work
        self._dispatched(work, work.replica_id)

    def _dispatched(self, work: Work, replica_id: int) -> None:
        replica = Replica(work.stage_id, replica_id)
        try:
            self._do(events.Dispatched(self._name(work), replica, work.request_id))
        except ValueError:
            logger.exception("recovery does not know where request %s is", work.request_id)

    def works_of(self, request_id: str) -> dict[int, Work] | None:
        """By stage, of a request that is here."""
        return self._works.get(request_id)

    def knows(self, work: Work) -> None:
        """A work that another one does; it may have to be done by itself yet."""
        if self._policy is not None:
            self._works.setdefault(work.request_id, {})[work.stage_id] = work

    def ended(self, work: Work) -> None:
        """It has ended well."""
        if self._policy is not None:
            name = self._name(work)
            self._do(events.Finished(name, self._policy.attempt(name)))

    def forget(self, request_id: str) -> None:
        """The request has left."""
        if self._policy is None or any(pool.queue.works_for_others(request_id) for pool in self._pools):
            return
        works = self._works.pop(request_id, {})
        for work in works.values():
            self._do(events.Aborted(self._name(work)))
            self._lost.pop(self._name(work), None)
        self.parking.forget(request_id)
        if self._together is not None:
            self._together.forget(request_id, works)
            for name in list(self._works):  # of those that this one has left last, who had left before
                if name not in self._orchestrator.request_states:
                    self.forget(name)

    async def died(self, pool: Any, replica_id: int, error: Exception) -> bool:
        """A replica is dead. Whether that was dealt with here."""
        if self._policy is None:
            return False
        replica = Replica(pool.stage_id, replica_id)
        logger.error("stage %d replica %d is dead: %s", pool.stage_id, replica_id, error)
        if replica_id in pool.live_replica_ids():
            pool.evict_replica(replica_id)
        self._orchestrator._remove_stage_replica_waiting(pool.stage_id, replica_id)
        lost = pool.queue.lost(replica_id)
        if self._together is not None:
            for work in self._together.unsent(pool, replica_id, self._works):
                self._dispatched(work, replica_id)
                work.replica_id, work.started, work.spoke = UNPLACED, None, False
                lost.append(work)
        for work in lost:
            self._lost[self._name(work)] = work
            pool._request_bindings.pop(work.request_id, None)
            if pool.output_processor is not None:
                pool.output_processor.remove_request(work.runs_as)
            if self._together is not None:
                for taken in self._together.stop(work, self._works[work.request_id]):
                    self._do(events.Aborted(self._name(taken)))
        self._fail_sessions(pool, replica_id, error)
        self._do(events.Suspected(replica, str(error)))  # nobody goes there while payloads are looked for
        self._orchestrator.spawn(self._after(pool, replica, lost, str(error)))
        return True

    async def _after(self, pool: Any, replica: Replica, lost: list[Work], cause: str) -> None:
        if pool.stage_id and not self._orchestrator.async_chunk and self._payloads.arrive_at(pool):
            names = [work.request_id for work in lost]
            look = partial(self._payloads.take_back, pool, names, HELD_SECONDS)
            held = await asyncio.get_running_loop().run_in_executor(None, look)
            logger.warning("of %d payloads for stage %d, %d are still held", len(names), pool.stage_id, len(held))
            for work in lost:
                if work.request_id in held:
                    self._orchestrator.sharing.lies(work.request_id, pool.stage_id)
                else:
                    for stage_id in range(pool.stage_id):
                        self._do(events.OutputLost(self._name(work), stage_id))
        if sends_caches(self._pools[: pool.stage_id]):  # it has got them
            for work in lost:
                for stage_id in range(pool.stage_id):
                    self._do(events.OutputLost(self._name(work), stage_id))
        for work in lost:
            if self._together is not None and not self._together.may_run_again(work.request_id):
                self._do(events.Aborted(self._name(work)))
                await self._give_up(work, "it has companions")
        self._do(events.Died(replica, cause))

    def _fail_sessions(self, pool: Any, replica_id: int, error: Exception) -> None:
        """What did not come through the queue and is not done there: it has state in the replica that is gone."""
        orchestrator = self._orchestrator
        for request_id, bound in list(pool._request_bindings.items()):
            if bound != replica_id:
                continue
            pool._request_bindings.pop(request_id)
            state = orchestrator.request_states.get(request_id)
            direct = state is not None and (
                state.streaming.enabled or state.session_owned or orchestrator._cfg_tracker.is_companion(request_id)
            )
            if direct and pool.stage_id not in state.finished_stage_ids:
                orchestrator.spawn(self._fail(request_id, pool.stage_id, str(error)))

    # ---- what is asked for

    def _do(self, event: Any) -> None:
        orchestrator = self._orchestrator
        for action in self._policy.on_event(event, orchestrator.clock()):
            match action:
                case events.Restart(replica):
                    orchestrator.spawn(self._restart(replica))
                case events.Redispatch(name, replica, _, stages):
                    orchestrator.spawn(self._again(name, replica, stages))
                case events.Fail(name, reason):
                    work = self._lost.pop(name, None)
                    if work is not None:
                        orchestrator.spawn(self._give_up(work, reason.value))
                case events.Record(incident):
                    orchestrator.policies.incident(incident)

    def tick(self) -> None:
        if self._policy is None:
            return
        self._do(events.Tick())
        self.parking.tick(self._orchestrator.clock())

    async def _again(self, name: str, replica: Replica, stages: tuple[int, ...]) -> None:
        work = self._lost.pop(name, None)
        if work is None:
            return
        if self._together is not None:
            if work.request_id in self._works:
                await self._together.resume(work, replica.index, self._works[work.request_id])
            return
        orchestrator = self._orchestrator
        receivers = orchestrator.stage_pools[work.stage_id].queue.receivers(work.request_id)
        for receiver in receivers:
            orchestrator.outlet.runs_again(receiver, work.stage_id)
        if stages[0] != work.stage_id:
            work = self._rewound(work, stages[0], receivers[0])
            if work.request_id == name:
                work.again = True
            else:
                self._do(events.Aborted(name))
                self._works.pop(name, None)
        else:
            work.again = True
        await orchestrator.stage_pools[replica.stage].queue.place(work, replica.index)

    def _rewound(self, work: Work, stage_id: int, leader: str) -> Work:
        """The work at an earlier stage, to be done once more.

        It is done in the name of who leads now. It comes back from there to the stage that was interrupted, where all
        that followed still do.
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
                orchestrator.outlet.runs_again(leader, later)
        earlier = self._works[leader][stage_id]
        earlier.replica_id, earlier.started, earlier.spoke = UNPLACED, None, False
        return earlier

    async def _give_up(self, work: Work, why: str) -> None:
        for receiver in self._orchestrator.stage_pools[work.stage_id].queue.receivers(work.request_id):
            await self._fail(receiver, work.stage_id, f"the replica that ran it died ({why})")

    async def _fail(self, request_id: str, stage_id: int, why: str) -> None:
        orchestrator = self._orchestrator
        await orchestrator.output_async_queue.put(
            ErrorMessage(error=f"Stage-{stage_id}: {why}", fatal=True, request_id=request_id, stage_id=stage_id)
        )
        companions = orchestrator._cfg_tracker.cleanup_parent(request_id)
        await orchestrator._cleanup_request_ids([request_id, *companions], abort=True, release_owners=True)

    async def _restart(self, replica: Replica) -> None:
        from vllm_omni_sched.omni.stages.restart import start_replica

        pool = self._orchestrator.stage_pools[replica.stage]
        logger.warning("starting stage %d replica %d again", replica.stage, replica.index)
        loop = asyncio.get_running_loop()
        try:
            start = partial(start_replica, self._runtime, replica.stage, replica.index, self._orchestrator.moves.places)
            client = await loop.run_in_executor(None, start)
        except Exception as error:
            logger.exception("stage %d replica %d did not start", replica.stage, replica.index)
            self._do(events.RestartFailed(replica, str(error)))
            return
        await self._orchestrator.forget_items(replica.stage)
        self._orchestrator.policies.board.restarted(replica.stage, replica.index)
        pool.attach(replica.index, client)
        self._orchestrator.moves.away.discard(replica)
        logger.warning("stage %d replica %d is back", replica.stage, replica.index)
        self._do(events.Restarted(replica))
        self.parking.unpark(replica.stage)
        await self._orchestrator.release()

    # ---- replicas that move

    def tell(self, event: events.Event) -> None:
        """Of what was done to a replica on purpose."""
        if self._policy is not None:
            self._do(event)

    def well(self, replica: Replica) -> bool:
        """Whether it serves, as far as is known here."""
        return self._policy is None or self._policy.serves(replica)

    def in_flight(self, replica: Replica) -> bool:
        """Whether requests are in it, or are to come to it."""
        return self._policy is not None and bool(self._policy.in_flight(replica))

    def _name(self, work: Work) -> str:
        """Of a request in flight: in async-chunk mode it is in all stages at once."""
        return f"{work.request_id}@{work.stage_id}" if self._orchestrator.async_chunk else work.request_id

    # ---- who may be dead

    def suspect(self, pool: Any, replica_id: int, why: str) -> None:
        """A replica does not answer: nobody is moved there until it does (`answers`), or has died."""
        if self._policy is not None:
            self._do(events.Suspected(Replica(pool.stage_id, replica_id), why))

    def answers(self, pool: Any, replica_id: int) -> None:
        """It does again."""
        if self._policy is not None:
            self._do(events.Cleared(Replica(pool.stage_id, replica_id)))
