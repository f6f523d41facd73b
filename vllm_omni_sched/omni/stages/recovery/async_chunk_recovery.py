"""Restart requests in async-chunk mode, where a request is in all stages at a time and runs again in all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.core.pipeline.recovery import PipelineRecovery
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.stages.payloads import Payloads
from vllm_omni_sched.omni.stages.recovery.handover import Handovers
from vllm_omni_sched.omni.stages.recovery.run_names import RunNames
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)

PIECES = 4096  # most pieces of a stage without an output limit
STEPS = 64  # pieces beyond the tokens: of the prompt, and the last one


class AsyncChunkRecovery:
    """Withdraws the remains of a request after a death, and restarts it from its first stage.

    1. The stages have exchanged pieces, each of which is received once: the pieces that a dead replica received are
       lost, and the others cannot resume from theirs. So all of them restart, under a new name.
    2. Outputs of the earlier run are dropped; a client gets only what is new to it.
    3. Pieces that were not received are removed from the connectors when the request has left.
    """

    def __init__(
        self, orchestrator: ScheduledOrchestrator, payloads: Payloads, names: RunNames, handovers: Handovers
    ) -> None:
        self._orchestrator, self._payloads = orchestrator, payloads
        self._names, self._handovers = names, handovers

    def may_run_again(self, request_id: str) -> bool:
        """Return False for requests with companions of classifier-free guidance, which are paired by their names."""
        return not self._orchestrator._cfg_tracker.has_companions(request_id)

    def unsent(self, pool: ScheduledPool, replica_id: int, recovery: PipelineRecovery) -> list[Work]:
        """Return the works that a replica had finished but perhaps not sent: the next stage is not done with them."""
        if pool.stage_id + 1 >= len(self._orchestrator.stage_pools):
            return []
        after = self._orchestrator.stage_pools[pool.stage_id + 1].queue
        names = [one.request_id for one in self._handovers.of_replica(pool.stage_id, replica_id)]
        found = {name: recovery.works_of(name).get(pool.stage_id) for name in names}
        return [
            work
            for name, work in found.items()
            if isinstance(work, Work) and not pool.queue.has_work(name) and after.has_work(name)
        ]

    def stop(self, lost: Work, recovery: PipelineRecovery) -> None:
        """Withdraw a request from all stages; that of ``lost`` has lost it.

        A waiting work does not start before ``lost`` has a place: it would wait for pieces, which has a time limit.

        Args:
            recovery: knows the works of the request; waiting ones become known to it.
        """
        name, orchestrator, pools = lost.request_id, self._orchestrator, self._run_with(lost)
        for pool in pools:
            pool.queue.take_out(name)
        known = recovery.works_of(name)
        works = {pool.stage_id: work for pool in pools if isinstance(work := known.get(pool.stage_id), Work)}
        present_in = [pool.queue.receivers(name) for pool in pools]
        everybody = max(present_in, key=len)  # requests that share a stage share all; an ended stage has no receivers
        if name not in orchestrator.request_states:  # the request that began it has left
            everybody = next((these for these in present_in if these[0] != name), everybody)
        for stage_id in works:
            orchestrator.stage_pools[stage_id].queue.regroup(name, everybody)
        present = self._start_new_run(name, works)
        for stage_id, work in works.items():
            pool = orchestrator.stage_pools[stage_id]
            self._reset_output(pool, name)
            replica_id = work.replica_id
            work.bound = None if work is lost else pool.get_bound_replica_id(name)
            if work is lost or not pool.queue.withdraw(work):
                continue
            orchestrator.driver.board.aborted(stage_id, replica_id, name)  # it may run elsewhere, or never again
            if pool.output_processor is not None:
                pool.output_processor.abort_requests([work.runs_as], internal=True)
            client = pool.clients[replica_id]
            if client is not None:
                orchestrator.spawn(abort_run(client, present[stage_id]))

    def _run_with(self, lost: Work) -> Sequence[ScheduledPool]:
        """Return the stages that run again with a work."""
        return self._orchestrator.stage_pools

    def _start_new_run(self, name: str, works: Mapping[int, Work]) -> dict[int, str]:
        """Begin the next run of a request, and return its names in the engines in the one before, by stage."""
        present = {stage_id: self._names.present(work.runs_as) for stage_id, work in works.items()}
        self._names.start_new_run(name, {work.runs_as for work in works.values()})
        self._handovers.forget(name)
        return present

    def _reset_output(self, pool: ScheduledPool, name: str) -> None:
        orchestrator, stage_id = self._orchestrator, pool.stage_id
        receivers = pool.queue.receivers(name)
        orchestrator.deduplicator.runs_again(stage_id, receivers)
        for receiver in receivers:
            state = orchestrator.request_states.get(receiver)
            if state is not None:
                state.finished_stage_ids.discard(stage_id)
                state.finished_final_output_stage_ids.discard(stage_id)
                if state.pending_final_output is not None and state.pending_final_output.stage_id == stage_id:
                    state.pending_final_output = None

    def renew_sender(self, work: Work) -> None:
        """Tell a work that runs again where the previous stage runs now, which sends its pieces."""
        if getattr(work.request, "payload_sender_info", None) is not None:
            work.request.payload_sender_info = self._orchestrator._build_payload_sender_info(
                work.stage_id - 1, request_id=work.request_id
            )

    def forget(self, request_id: str, works: Mapping[int, StageWork]) -> None:
        """Forget a request that has left, and remove its pieces from the connectors."""
        names = self._names.all_names(request_id)
        for pool in self._orchestrator.stage_pools:
            if names and self._payloads.arrive_at(pool) and pool.stage_id - 1 in works:
                most = pieces_of(works[pool.stage_id - 1])
                discard = partial(self._payloads.discard, pool, names, most)
                self._orchestrator.spawn(in_thread(discard))


async def abort_run(client: Any, name: str) -> None:
    """Abort a run in an engine, by its name there."""
    try:
        await client.abort_as_named([name])
    except Exception as error:  # noqa: BLE001 - the engine may be dead, too
        logger.warning("aborting run %s in its engine failed; its outputs are dropped as they arrive: %s", name, error)


async def in_thread(work: Callable[[], Any]) -> None:
    """Run blocking work on a thread."""
    await asyncio.get_running_loop().run_in_executor(None, work)


def pieces_of(work: StageWork) -> int:
    """Return the most pieces that a stage may have sent for a request."""
    assert isinstance(work, Work)
    most = getattr(work.state.sampling_params_list[work.stage_id], "max_tokens", None)
    return PIECES if most is None else most + STEPS
