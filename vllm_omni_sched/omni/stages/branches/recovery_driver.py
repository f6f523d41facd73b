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
from vllm_omni_sched.omni.stages.branches.chunk_recovery import BranchChunkRecovery
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
        self._chunks: BranchChunkRecovery | None = None
        if self._core is not None and orchestrator.driver.graph.chunked:
            self._chunks = BranchChunkRecovery(orchestrator, payloads, self.handovers)
        self._async_chunk = self._chunks
        self._on_their_way: dict[tuple[str, int], asyncio.Future[None]] = {}  # by request and stage
        for pool in self._pools:
            pool.use_run_names(BranchRunNames(partial(orchestrator.targets, pool.stage_id)))

    def _wrap_clients(self, names: RunNames) -> None:
        """Leave the clients as they are: each stage has names of its own, with recovery or without."""

    # ---- events

    def started(self, work: Work) -> None:
        self.handovers.runs_again(work.request_id, work.stage_id)

    def notes_outputs(self) -> bool:
        return True

    def on_output(
        self, stage_id: int, replica_id: int, owner: str, receivers: Sequence[str], *, finished: bool
    ) -> None:
        orchestrator = self._orchestrator
        if finished or not orchestrator.driver.graph.stage(stage_id).reads_chunks:
            for name in (owner, *receivers):
                self.handovers.arrived(name, stage_id)
            if finished and self._chunks is not None and orchestrator.driver.graph.stage(stage_id).reads_chunks:
                self._chunks.ended(stage_id, owner)
        orchestrator.sharing.arrived(owner, stage_id)
        if finished and self._core is not None:
            whole = orchestrator.whole_sent_to(owner, stage_id)
            for name in receivers:
                self.handovers.finished(stage_id, replica_id, name, whole)
            if any(name in orchestrator.request_states for name in receivers):
                chunked = [one for one in orchestrator.sent_to(owner, stage_id) if one not in whole]
                self.handovers.finished(stage_id, replica_id, owner, chunked)

    async def forwarding_to(self, request_id: str, stage_id: int, forward: Coroutine[Any, Any, None]) -> None:
        """Take a request to a stage; it cannot be recalled from there before it has arrived."""
        done = self._on_their_way[request_id, stage_id] = asyncio.get_running_loop().create_future()
        try:
            await forward
        finally:
            done.set_result(None)
            if self._on_their_way.get((request_id, stage_id)) is done:
                del self._on_their_way[request_id, stage_id]

    async def _examine(self, pool: ScheduledPool, replica: Replica, lost: list[Work]) -> None:
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
            for source in sources:
                self._orchestrator.sharing.lost(request_id, (source, pool.stage_id))
            pool.queue.handle(e.InputsLost(pool.stage_id, request_id, sources))
        for work in lost:
            if (
                self._restarts_together(work)
                and self._async_chunk
                and not self._async_chunk.may_run_again(work.request_id)
            ):
                pool.queue.handle(e.CannotRunAgain(pool.stage_id, work.request_id, FailReason.COMPANIONS))
        await self._recall_unsent(pool, replica)

    def _edges_into(self, stage_id: int) -> list[Edge]:
        """Return the edges by which a stage gets whole payloads."""
        stage = self._orchestrator.driver.graph.stage(stage_id)
        sources = () if stage.reads_chunks else stage.sources
        return [(source, stage_id) for source in sources if self._payloads.carries((source, stage_id))]

    async def _in_thread(self, take_back: Any, edge: Edge, names: dict[str, str]) -> set[str]:
        if not names:
            return set()
        work = partial(take_back, edge, names, recovery_driver.HELD_SECONDS)
        held: set[str] = await asyncio.get_running_loop().run_in_executor(None, work)
        return held

    async def _recall_unsent(self, pool: ScheduledPool, replica: Replica) -> None:
        held: set[tuple[str, Edge]] = set()
        for edge in dict.fromkeys(edge for _, edge in self._unsent(pool, replica)):
            requests = [name for name, at in self._unsent(pool, replica) if at == edge]
            names = {name: self._orchestrator.sharing.payload_name(name, edge) for name in requests}
            runs = {run: run for run in names.values()}  # requests that share work have one payload
            found = await self._in_thread(self._payloads.take_back_from, edge, runs)
            held |= {(name, edge) for name, run in names.items() if run in found}
        while True:
            unsent = [one for one in self._unsent(pool, replica) if one not in held]
            waited = [
                self._on_their_way[name, edge[1]] for name, edge in unsent if (name, edge[1]) in self._on_their_way
            ]
            if not waited:
                break
            await asyncio.wait(waited)
        for name, edge in unsent:
            await self._recall_from(name, edge, replica.index)

    def _unsent(self, pool: ScheduledPool, replica: Replica) -> list[tuple[str, Edge]]:
        """Return the whole payloads of a replica that may not have been sent: their requests and edges."""
        graph = self._orchestrator.driver.graph
        return [
            (one.request_id, edge)
            for edge, one in self.handovers.edges_of_replica(pool.stage_id, replica.index)
            if not graph.stage(edge[1]).reads_chunks
        ]

    def remake_inputs(self, pool: ScheduledPool, request_id: str, sources: Sequence[int]) -> None:
        """Make inputs of a request again that waits in a stage for payloads that will not come."""
        if self._core is not None:
            self._orchestrator.spawn(self._remake_inputs(pool, request_id, sources))

    async def _remake_inputs(self, pool: ScheduledPool, request_id: str, sources: Sequence[int]) -> None:
        while (request_id, pool.stage_id) in self._on_their_way:
            await asyncio.wait([self._on_their_way[request_id, pool.stage_id]])
        some = min(self._pools[sources[0]].live_replica_ids(), default=0)
        await self._recall_from(request_id, (sources[0], pool.stage_id), some, sources[1:])

    async def _recall_from(self, request_id: str, edge: Edge, replica_id: int, others: Sequence[int] = ()) -> None:
        """Take a request back from a stage whose input was lost with the replica that should have sent it.

        Args:
            others: other sources whose outputs were lost for the stage, too.
        """
        orchestrator, after = self._orchestrator, self._pools[edge[1]]
        if self._core is None or not self._core.works_of(request_id):
            return
        lost = [edge[0], *others]
        work = after.queue.running.get(request_id)
        if work is not None:
            lost += [one for one in await self._withdraw(after, work, edge) if one not in lost]
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
        state.finished_stage_ids.difference_update(lost)
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

    def _restarts_together(self, work: Work) -> bool:
        return self._core is not None and self._core.restarts_together(work)

    def _goes_through_again(self, state: Any, stages: Sequence[int]) -> None:
        """Do nothing: where stages branch, its flow says when it is sent to a stage."""

    def _forget(self, request_id: str, works: dict[int, StageWork]) -> None:
        super()._forget(request_id, works)
        for pool in self._pools:
            if pool.names is not None:
                pool.names.forget(request_id)
        self._orchestrator.forget_runs(request_id)

    async def fail(self, request_id: str, stage_id: int, why: str, reason: FailReason) -> None:
        if await self._orchestrator.goes_on_without(stage_id, request_id, why):
            self._orchestrator.driver.board.given_up(stage_id, reason.value)
            return
        await super().fail(request_id, stage_id, why, reason)
