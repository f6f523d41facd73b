"""Recover requests in stages that branch after the death of a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery.events import FailReason, Replica
from vllm_omni_sched.omni.stages.branches.handovers import EdgeHandovers
from vllm_omni_sched.omni.stages.branches.names import BranchRunNames
from vllm_omni_sched.omni.stages.branches.payloads import Edge, EdgePayloads
from vllm_omni_sched.omni.stages.recovery import recovery_driver
from vllm_omni_sched.omni.stages.recovery.async_chunk_recovery import abort_run
from vllm_omni_sched.omni.stages.recovery.recovery_driver import RecoveryDriver
from vllm_omni_sched.omni.stages.recovery.run_names import RunNames
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.branches.orchestrator import BranchingOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)


class BranchRecoveryDriver(RecoveryDriver):
    """Finds out which inputs of which edges are lost with a replica; `RequestFlow` says what runs again.

    A run that is withdrawn from a live replica gets a new name in that stage, and inputs that still lie under the old
    one are sent again under the new one: neither the engine nor a connector takes data of the first for the second.
    """

    _orchestrator: BranchingOrchestrator
    _payloads: EdgePayloads
    handovers: EdgeHandovers  # type: ignore[assignment]

    def __init__(self, orchestrator: BranchingOrchestrator, runtime: Any, payloads: EdgePayloads) -> None:
        super().__init__(orchestrator, runtime, payloads, RunNames())
        self.handovers = EdgeHandovers()
        self._on_their_way: dict[tuple[str, int], asyncio.Future[None]] = {}  # by request and stage
        for pool in self._pools:
            pool.use_run_names(BranchRunNames(partial(orchestrator.targets, pool.stage_id)))

    def _wrap_clients(self, names: RunNames) -> None:
        """Leave the clients as they are: each stage has names of its own, with recovery or without."""

    # ---- events

    def started(self, work: Work) -> None:
        self.handovers.runs_again(work.request_id, work.stage_id)

    def on_output(
        self, stage_id: int, replica_id: int, owner: str, receivers: Sequence[str], *, finished: bool
    ) -> None:
        self.handovers.arrived(owner, stage_id)
        self._orchestrator.sharing.arrived(owner, stage_id)
        if finished and self._core is not None:
            self.handovers.finished(stage_id, replica_id, owner, self._orchestrator.sent_for(owner, stage_id))

    async def forwarding_to(self, request_id: str, stage_id: int, forward: Coroutine[Any, Any, None]) -> None:
        """Take a request to a stage; it cannot be recalled from there before it has arrived."""
        done = self._on_their_way[request_id, stage_id] = asyncio.get_running_loop().create_future()
        try:
            await forward
        finally:
            done.set_result(None)
            if self._on_their_way.get((request_id, stage_id)) is done:
                del self._on_their_way[request_id, stage_id]

    async def _examine(self, pool: ScheduledPool, replica: Replica, lost: list[Work], cause: str) -> None:
        missing: dict[str, tuple[int, ...]] = {}
        for edge in self._edges_into(pool.stage_id):
            names = {work.request_id: self._orchestrator.run_name(work.request_id, edge[1]) for work in lost}
            held = await self._in_thread(self._payloads.take_back_from, edge, names)
            for request_id in names:
                if request_id in held:
                    self._orchestrator.sharing.sent(request_id, edge)
                else:
                    missing[request_id] = (*missing.get(request_id, ()), edge[0])
        if lost:
            logger.warning(
                "stage %d replica %d is dead: %d of its %d requests still have their inputs; for the others, the "
                "stages run again whose outputs are gone",
                pool.stage_id,
                replica.index,
                len(lost) - len(missing),
                len(lost),
            )
        for request_id, sources in missing.items():
            pool.queue.handle(e.InputsLost(pool.stage_id, request_id, sources))
        await self._recall_unsent(pool, replica)
        pool.queue.handle(e.DeathExamined(pool.stage_id, replica.index, cause))

    def _edges_into(self, stage_id: int) -> list[Edge]:
        """Return the edges by which a stage gets payloads."""
        sources = self._orchestrator.driver.graph.stage(stage_id).sources
        return [(source, stage_id) for source in sources if self._payloads.carries((source, stage_id))]

    async def _in_thread(self, take_back: Any, edge: Edge, names: dict[str, str]) -> set[str]:
        if not names:
            return set()
        work = partial(take_back, edge, names, recovery_driver.HELD_SECONDS)
        held: set[str] = await asyncio.get_running_loop().run_in_executor(None, work)
        return held

    async def _recall_unsent(self, pool: ScheduledPool, replica: Replica) -> None:
        held: set[tuple[str, Edge]] = set()
        edges = dict.fromkeys(edge for edge, _ in self.handovers.edges_of_replica(pool.stage_id, replica.index))
        for edge in edges:
            names = {
                one.request_id: self._orchestrator.run_name(one.request_id, edge[1])
                for at, one in self.handovers.edges_of_replica(pool.stage_id, replica.index)
                if at == edge
            }
            held |= {(name, edge) for name in await self._in_thread(self._payloads.take_back_from, edge, names)}
        while True:
            unsent = [
                (one.request_id, edge)
                for edge, one in self.handovers.edges_of_replica(pool.stage_id, replica.index)
                if (one.request_id, edge) not in held
            ]
            waited = [
                self._on_their_way[name, edge[1]] for name, edge in unsent if (name, edge[1]) in self._on_their_way
            ]
            if not waited:
                break
            await asyncio.wait(waited)
        for name, edge in unsent:
            await self._recall_from(name, edge, replica.index)

    async def _recall_from(self, request_id: str, edge: Edge, replica_id: int) -> None:
        """Take a request back from a stage whose input was lost with the replica that should have sent it."""
        orchestrator, after = self._orchestrator, self._pools[edge[1]]
        if self._core is None or not self._core.works_of(request_id):
            return
        lost = [edge[0]]
        work = after.queue.running.get(request_id)
        if work is not None:
            lost += await self._withdraw(after, work, edge)
        elif (work := after.queue.take_out(request_id)) is None:
            works = self._core.works_of(request_id)
            if not (self.parking.forget(request_id, after.stage_id) and isinstance(works.get(edge[0]), Work)):
                return  # it has finished there
            work = works[edge[0]]  # type: ignore[assignment]
        if request_id not in orchestrator.request_states:
            return  # it has left meanwhile
        logger.warning(
            "request %s: its input from stage %d for stage %d was lost with a replica, and is made again",
            request_id,
            *edge,
        )
        self.handovers.arrived(request_id, after.stage_id)
        for source in lost:
            orchestrator.sharing.lost(request_id, (source, after.stage_id))
        state = orchestrator.request_states[request_id]
        state.finished_stage_ids.discard(edge[0])
        state.stage_submit_ts.pop(after.stage_id, None)
        assert work is not None
        after.queue.handle(e.Recalled(work, after.stage_id, replica_id, tuple(lost)))

    async def _withdraw(self, pool: ScheduledPool, work: Work, edge: Edge) -> list[int]:
        """Stop a run in a live replica; return the sources, besides that of the edge, whose outputs it had taken."""
        assert pool.names is not None
        name, replica_id = work.request_id, work.replica_id
        before, run = self._orchestrator.run_name(name, pool.stage_id), pool.names.present(work.runs_as)
        pool.queue.withdraw(work)
        pool._request_bindings.pop(name, None)
        self._orchestrator.driver.board.aborted(pool.stage_id, replica_id, name)
        if pool.output_processor is not None:
            pool.output_processor.abort_requests([work.runs_as], internal=True)
        client = pool.clients[replica_id]
        if client is not None:
            self._orchestrator.spawn(abort_run(client, run))
        pool.names.start_new_run(name, {work.runs_as})
        after, gone = self._orchestrator.run_name(name, pool.stage_id), []
        loop = asyncio.get_running_loop()
        for other in self._edges_into(pool.stage_id):
            if other == edge:
                continue
            if await loop.run_in_executor(None, self._payloads.move, other, before, after):
                self._orchestrator.sharing.sent(name, other)
            else:
                gone.append(other[0])
        return gone

    # ---- actions of the core

    def _runs_again(self, work: Work, leader: str, receivers: Sequence[str], stages: Sequence[int]) -> None:
        orchestrator = self._orchestrator
        state = orchestrator.request_states.get(leader)
        for stage_id in {work.stage_id, *stages}:
            orchestrator.deduplicator.runs_again(leader, stage_id)
            if stage_id == work.stage_id and stages == (work.stage_id,):
                continue  # it is on its way to another replica
            self.handovers.runs_again(leader, stage_id)
            if state is not None:
                state.finished_stage_ids.discard(stage_id)

    def _forget(self, request_id: str, works: dict[int, StageWork]) -> None:
        super()._forget(request_id, works)
        for pool in self._pools:
            if pool.names is not None:
                pool.names.forget(request_id)

    async def fail(self, request_id: str, stage_id: int, why: str, reason: FailReason) -> None:
        if await self._orchestrator.goes_on_without(stage_id, request_id, why):
            self._orchestrator.driver.board.given_up(stage_id, reason.value)
            return
        await super().fail(request_id, stage_id, why, reason)
