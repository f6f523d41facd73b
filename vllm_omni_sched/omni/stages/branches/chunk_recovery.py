"""Restart stages that branch and exchange chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm_omni_sched.core.pipeline.recovery import PipelineRecovery
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.graph.flow import StagePhase
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.omni.stages.branches.handovers import EdgeHandovers
from vllm_omni_sched.omni.stages.branches.payloads import EdgePayloads
from vllm_omni_sched.omni.stages.recovery import recovery_driver
from vllm_omni_sched.omni.stages.recovery.async_chunk_recovery import AsyncChunkRecovery, pieces_of
from vllm_omni_sched.omni.stages.recovery.run_names import RunNames
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.branches.orchestrator import BranchingOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool


class BranchChunkRecovery(AsyncChunkRecovery):
    """Withdraws a request after a death from the stages that exchange chunks with the dead one, and restarts it there.

    The rules are those of `AsyncChunkRecovery`. Stages that exchange no chunks with the dead one are not disturbed. An
    autoregressive stage may end by a limit of its own, before those that it reads or before it has received all that
    they sent; the chunks that it leaves are removed, too.
    """

    _orchestrator: BranchingOrchestrator

    def __init__(self, orchestrator: BranchingOrchestrator, payloads: EdgePayloads, handovers: EdgeHandovers) -> None:
        super().__init__(orchestrator, payloads, RunNames(), handovers)  # type: ignore[arg-type]
        self._edges, self._edge_handovers = payloads, handovers
        self._left_early: dict[str, set[int]] = {}  # stages that ended before those that they read, by request

    def ended(self, stage_id: int, request_id: str) -> None:
        """Record that a stage that reads chunks has ended."""
        stage, known = self._orchestrator.driver.graph.stage(stage_id), self._orchestrator.driver.known.get(request_id)
        flow = None if known is None else known.flow
        reads_on = flow is None or any(flow.phase(source) is StagePhase.STARTED for source in stage.sources)
        if stage.kind is StageKind.AR and reads_on:
            self._left_early.setdefault(request_id, set()).add(stage_id)

    def unsent(self, pool: ScheduledPool, replica_id: int, recovery: PipelineRecovery) -> list[Work]:
        graph, pools = self._orchestrator.driver.graph, self._orchestrator.stage_pools
        names = dict.fromkeys(
            one.request_id
            for edge, one in self._edge_handovers.edges_of_replica(pool.stage_id, replica_id)
            if graph.stage(edge[1]).reads_chunks and pools[edge[1]].queue.has_work(one.request_id)
        )
        found = {name: recovery.works_of(name).get(pool.stage_id) for name in names}
        return [work for name, work in found.items() if isinstance(work, Work) and not pool.queue.has_work(name)]

    def stop(self, lost: Work, recovery: PipelineRecovery) -> None:
        if recovery.restarts_together(lost):
            super().stop(lost, recovery)

    def _run_with(self, lost: Work) -> Sequence[ScheduledPool]:
        flow = lost.known.flow
        assert flow is not None
        group = flow.plan.chunk_groups[lost.stage_id]
        return [self._orchestrator.stage_pools[one] for one in group if flow.phase(one) is not StagePhase.DROPPED]

    def _start_new_run(self, name: str, works: Mapping[int, Work]) -> dict[int, str]:
        present = {}
        for stage_id, work in works.items():
            names = self._orchestrator.stage_pools[stage_id].names
            assert names is not None
            present[stage_id] = names.present(work.runs_as)
            names.start_new_run(name, {work.runs_as})
            self._edge_handovers.runs_again(name, stage_id)
            self._edge_handovers.arrived(name, stage_id)
        return present

    def renew_sender(self, work: Work) -> None:
        """Do nothing: connectors that need the address of the sender are refused at the start."""

    def forget(self, request_id: str, works: Mapping[int, StageWork]) -> None:
        orchestrator = self._orchestrator
        left_early = self._left_early.pop(request_id, ())
        for stage_id, work in works.items():
            stage, flow = orchestrator.driver.graph.stage(stage_id), work.known.flow
            names = orchestrator.stage_pools[stage_id].names
            runs = [] if names is None or not stage.reads_chunks else names.all_names(request_id)
            ended = flow is not None and flow.phase(stage_id) is StagePhase.DONE
            ran_once = ended and len(runs) == 1
            if not runs or (ran_once and stage.kind is not StageKind.AR):
                continue  # it has run for no request, or has received all chunks
            # what it reads had ended before it: all chunks are there, and mostly it has received them
            seconds = 0.0 if ran_once and stage_id not in left_early else recovery_driver.HELD_SECONDS
            for source in stage.sources:
                if source in works:
                    most = pieces_of(works[source])
                    discard = partial(self._edges.discard_chunks, (source, stage_id), runs, most)
                    orchestrator.spawn(orchestrator.sharing.when_there(discard, seconds))
