"""Extend vLLM-Omni's orchestrator with our decisions: batching, order, replicas, and recovery."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage_pool import StageUnavailableError

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery.events import FailReason, Incident, IncidentKind, Replica
from vllm_omni_sched.omni.stages.payloads import Payloads
from vllm_omni_sched.omni.stages.pipeline_driver import PipelineDriver
from vllm_omni_sched.omni.stages.placement.replica_migrator import ReplicaMigrator
from vllm_omni_sched.omni.stages.pool import ScheduledPool
from vllm_omni_sched.omni.stages.queue import StageQueue
from vllm_omni_sched.omni.stages.recovery.absent_replicas import AbsentReplicas
from vllm_omni_sched.omni.stages.recovery.hang_detector import HangDetector
from vllm_omni_sched.omni.stages.recovery.liveness import Liveness
from vllm_omni_sched.omni.stages.recovery.output_deduplicator import OutputDeduplicator
from vllm_omni_sched.omni.stages.recovery.recovery_driver import RecoveryDriver
from vllm_omni_sched.omni.stages.recovery.run_names import RunNames
from vllm_omni_sched.omni.stages.recovery.stall_guard import StallGuard
from vllm_omni_sched.omni.stages.reports.processes import ReplicaDeadError
from vllm_omni_sched.omni.stages.sharing import Sharing
from vllm_omni_sched.omni.stages.work import UNPLACED, Work

logger = get_logger(__name__)

CHECK_SECONDS = 0.05  # between two checks of all stages; checks with a longer interval keep their own time


class ScheduledOrchestrator(Orchestrator):
    """Runs a turn-based pipeline with our decisions.

    vLLM-Omni's methods do the work; each one here adds a decision before or after it.

    Args:
        driver: driver of the pipeline core, which all stages share.
        runtime: vLLM-Omni's `StageRuntime`, which can start a replica.
        stage_pools: vLLM-Omni's pools, which nothing has used yet; each is replaced in this list by one of ours.
        clock: clock of all decisions.
        first_input_processor: input processor of the first stage, which belongs to the engine.
        original: the other arguments of vLLM-Omni's orchestrator.
    """

    stage_pools: list[ScheduledPool]

    def __init__(
        self,
        *,
        driver: PipelineDriver,
        runtime: Any,
        stage_pools: list[Any],
        clock: Callable[[], float] = monotonic_seconds,
        first_input_processor: Any = None,
        **original: Any,
    ) -> None:
        # in place, since the engine and the membership controller hold this list, too
        stage_pools[:] = [ScheduledPool.rebuild(pool, runtime) for pool in stage_pools]
        super().__init__(stage_pools=stage_pools, **original)
        self.driver, self.clock, self.first_input_processor = driver, clock, first_input_processor
        self.deduplicator = self.output_async_queue = OutputDeduplicator(
            self.output_async_queue, self._output_kind, self._streams
        )
        self._add_parts(runtime)
        driver.recovery = self.recovery
        self.liveness = Liveness(self._handle_dead_replica)
        self.migrator = ReplicaMigrator(self, runtime, driver.config.runtime.drain_seconds)
        self.layout = driver.layout(self.migrator)
        self.hang_detector = HangDetector(self, driver.config)
        self.stall_guard = StallGuard(self, driver.config.runtime.stalls_after_seconds)
        self._spawned: set[asyncio.Task[Any]] = set()
        self._publisher = driver.publish()
        self.absent = AbsentReplicas(self)
        for pool in self.stage_pools:
            pool.attach_queue(StageQueue(pool, driver, self, clock, driver.context.together))
            pool.membership = self

    def _add_parts(self, runtime: Any) -> None:
        """Make the parts that know how the stages are connected."""
        run_names = RunNames()
        self.payloads = Payloads(run_names.external)
        self.sharing = Sharing(self, self.payloads)
        self.recovery = RecoveryDriver(self, runtime, self.payloads, run_names)

    # ---- hooks of the queues

    def describe(
        self, pool: ScheduledPool, request_id: str, state: Any, request: Any, submit_args: dict[str, Any], now: float
    ) -> Work:
        return self.sharing.describe(pool, request_id, state, request, submit_args, now)

    def leads(self, pool: ScheduledPool, work: Work) -> None:
        self.sharing.leads(pool, work)

    def inherited(self, owner: str, heir: Work) -> None:
        self.sharing.inherits(owner, heir)

    # ---- inputs

    async def start(self, pool: ScheduledPool, work: Work) -> None:
        """Send a work to its replica; an error fails only that request, as elsewhere in vLLM-Omni."""
        if (replica_id := work.replica_id) == UNPLACED:
            return  # it was lost before it could be sent
        work.sent = True
        self.stall_guard.progressed(pool.queue.receivers(work.request_id))
        self.recovery.started(work)
        self.sharing.payload_read(work)
        try:
            await pool.run(work)
        except (EngineDeadError, StageUnavailableError) as error:
            if pool.queue.running.get(work.request_id) is work and work.replica_id == replica_id:
                await self._handle_dead_replica(pool.stage_id, replica_id, error)
        except Exception as error:  # noqa: BLE001 - vLLM-Omni's own guard tells which errors concern a request

            async def reraise(error: Exception = error) -> None:
                raise error

            receivers = pool.queue.receivers(work.request_id)
            pool.queue.finished(work.request_id, succeeded=False)
            for receiver in receivers:
                try:
                    await self._dispatch_or_fail_request(
                        reraise, req_id=receiver, stage_id=pool.stage_id, operation="scheduled submission"
                    )
                except Exception as unknown:
                    logger.exception(
                        "sending request %s to stage %d failed; the request fails", receiver, pool.stage_id
                    )
                    failed = SimpleNamespace(request_id=receiver)
                    if not await self.goes_on_without(pool.stage_id, receiver, repr(unknown)):
                        await super()._handle_stage_error(pool.stage_id, failed, error=repr(unknown))

    async def _handle_abort(self, msg: Any) -> None:
        await super()._handle_abort(msg)
        for request_id in msg.request_ids:  # outputs that arrived after the request had left
            self.deduplicator.forget(request_id)

    async def _handle_add_request(self, msg: Any) -> None:
        self.driver.arrived(msg, self.clock())
        if not self.recovery.parking.park(0, lambda: self._handle_add_request(msg), msg.request_id):
            await super()._handle_add_request(msg)

    async def _forward_to_next_stage(
        self, req_id: str, src_stage_id: int, output: Any, req_state: Any, **more: Any
    ) -> None:
        async def forward() -> None:
            if self.request_states.get(req_id) is req_state:
                await self._forward_to_next_stage(req_id, src_stage_id, output, req_state, **more)

        if not self.recovery.parking.park(src_stage_id + 1, forward, req_id):
            self.stall_guard.progressed([req_id])
            to_next = super()._forward_to_next_stage(req_id, src_stage_id, output, req_state, **more)
            await self.recovery.forwarding(req_id, to_next)

    def _register_running_request(self, req_state: Any) -> None:
        super()._register_running_request(req_state)
        self.stall_guard.arrived(req_state.request_id)

    async def _prewarm_async_chunk_stages(self, request_id: str, stage0_request: Any, req_state: Any) -> bool:
        if self.request_states.get(request_id) is not req_state:
            return False  # it failed while it was being released
        return await super()._prewarm_async_chunk_stages(request_id, stage0_request, req_state)

    # ---- outputs

    async def _handle_processed_outputs(self, stage_id: int, replica_id: int, outputs: list[Any]) -> None:
        self.hang_detector.on_output(stage_id, replica_id)
        pool = self.stage_pools[stage_id]
        queue, diffuses = pool.queue, pool.stage_type == "diffusion"
        delivered: list[Any] = []
        ended = False
        for output in outputs:
            receivers = queue.receivers(output.request_id)
            delivered += [renamed(output, receiver) for receiver in receivers]
            failed = getattr(output, "error", None) is not None
            work = queue.running.get(output.request_id)
            if work is not None and work.shown and not (failed or output.finished or diffuses):
                continue  # one of many tokens: it changes nothing here
            ended = queue.on_first_output(output.request_id) or ended
            completed = bool(output.finished) and not failed
            if completed or diffuses:  # tokens have been noted as they came (`_process_llm_stage_outputs`)
                self.stall_guard.progressed(receivers)
                self.recovery.on_output(stage_id, replica_id, output.request_id, receivers, finished=completed)
            if output.finished or failed:
                if not failed:  # a failed request sends nothing on
                    self.sharing.ended(stage_id, output.request_id, receivers)
                queue.finished(output.request_id, succeeded=not failed)
                if output.request_id not in self.request_states:  # it was begun for a request that has left
                    self.stage_pools[stage_id]._request_bindings.pop(output.request_id, None)
                ended = True
            elif work is not None and not work.shown:
                work.shown = True
                self.sharing.on_first_output(stage_id, receivers)
        await super()._handle_processed_outputs(stage_id, replica_id, delivered)
        if ended and self.driver.has_waiting:
            await self.release()

    async def _process_llm_stage_outputs(
        self, stage_id: int, replica_id: int, raw_outputs: Any, raw_terminal_request_ids: set[str]
    ) -> list[Any]:
        self.hang_detector.on_output(stage_id, replica_id)
        queue = self.stage_pools[stage_id].queue
        running, room, noted = queue.running, False, self.recovery.notes_outputs()
        progressed: list[str] = []
        for output in raw_outputs.outputs:  # a request that reports only its end shows nothing else before
            receivers = queue.receivers(output.request_id)
            progressed += receivers
            if noted:
                self.recovery.on_output(stage_id, replica_id, output.request_id, receivers, finished=False)
            if output.new_token_ids and (work := running.get(output.request_id)) is not None and not work.has_output:
                room = queue.on_first_output(output.request_id) or room
        self.stall_guard.progressed(progressed)
        if room and self.driver.has_waiting:
            await self.release()
        for failed in [one for one in raw_outputs.outputs if one.finish_reason is FinishReason.ERROR]:
            if queue.works_for_others(failed.request_id):  # vLLM-Omni handles only requests that are present
                raw_outputs.outputs.remove(failed)
                await self._handle_stage_error(
                    stage_id, failed, error=str(failed.stop_reason or "Stage request failed")
                )
        return await super()._process_llm_stage_outputs(stage_id, replica_id, raw_outputs, raw_terminal_request_ids)

    async def _handle_stage_error(self, stage_id: int, output: Any, *, error: str | None = None) -> None:
        queue = self.stage_pools[stage_id].queue
        receivers = queue.receivers(output.request_id)
        queue.finished(output.request_id, succeeded=False)
        for receiver in receivers:
            why = error if error is not None else str(getattr(output, "error", None) or "the stage failed")
            if not await self.goes_on_without(stage_id, receiver, why):
                await super()._handle_stage_error(stage_id, renamed(output, receiver), error=error)

    async def goes_on_without(self, stage_id: int, request_id: str, why: str) -> bool:
        """Let a request go on for outputs that do not need a stage which has failed for it; return whether it does."""
        return False  # on a line, all outputs that are still to come need it

    async def _cleanup_request_ids(
        self, request_ids: list[str], *, abort: bool = False, release_owners: bool = False
    ) -> list[Any]:
        orphans = [
            (pool, work)
            for request_id in request_ids
            for pool in self.stage_pools
            if (work := pool.queue.detach(request_id)) is not None
        ]
        self.payloads.left(request_ids)
        before = set(self.request_states)
        outputs = await super()._cleanup_request_ids(request_ids, abort=abort, release_owners=release_owners)
        for pool, work in orphans:
            await pool.abort_orphan(work.request_id, work.replica_id)
        for request_id in {*request_ids, *(before - set(self.request_states))}:
            self.sharing.forget(request_id)  # while the name under which its payloads were sent is known
            self.stall_guard.forget(request_id)
            if request_id not in self.request_states:
                self.deduplicator.forget(request_id)
                self.driver.left(request_id, self.clock())
        if self.driver.has_waiting:
            self.spawn(self.release())
        return outputs

    async def release(self) -> None:
        """Start all works that may run now, last stage first: requests that are nearly done make room."""
        await self.driver.release(self.clock())

    # ---- deaths

    async def _handle_dead_replica(self, stage_id: int, replica_id: int, error: Exception) -> None:
        """Handle a death once, however often and by whom it is reported: by then, its client is in the pool no more."""
        pool = self.stage_pools[stage_id]
        client = pool.clients[replica_id]
        if client is None or getattr(error, "client", client) is not client:
            return
        if self.recovery.on:
            self.recovery.died(pool, replica_id, error)
            return
        queue = pool.queue
        if self.driver.journal is not None:  # without recovery, nothing else keeps it
            lost = sum(work.replica_id == replica_id for work in queue.running.values())
            died = Incident(self.clock(), Replica(stage_id, replica_id), IncidentKind.DIED, str(error), lost)
            self.driver.journal.incident(died)
        following = [
            receiver
            for work in queue.running.values()
            if work.replica_id == replica_id
            for receiver in queue.receivers(work.request_id)
        ]
        await super()._handle_dead_replica(stage_id, replica_id, error)
        for request_id in following:
            if request_id in self.request_states:
                await self._fail_request_dead_stage(request_id, stage_id)

    async def _fail_request_dead_stage(self, req_id: str, stage_id: int) -> None:
        if self.recovery.on:
            why = self.recovery.outage(stage_id, FailReason.NO_REPLICA)
            await self.recovery.fail(req_id, stage_id, why, FailReason.NO_REPLICA)
        else:
            await super()._fail_request_dead_stage(req_id, stage_id)

    # ---- replicas of other hosts

    def joined(self, pool: ScheduledPool, replica_id: int) -> None:
        """Use a replica that was added to its pool: it has none of the items that were sent before."""
        self.spawn(self._welcome(pool))

    def when_examined(self, pool: ScheduledPool, replica_id: int, do: Callable[[], None]) -> None:
        self.recovery.when_examined(Replica(pool.stage_id, replica_id), do)

    async def _welcome(self, pool: ScheduledPool) -> None:
        await self.forget_items(pool.stage_id)
        self.recovery.parking.unpark(pool.stage_id)
        await self.release()

    def silent(self, pool: ScheduledPool, replica_id: int, address: str) -> None:
        """Handle a replica that vLLM-Omni's coordinator no longer reports; without recovery, it is given up."""
        where = pool.host_of(replica_id, client := pool.clients[replica_id]) or "the host of the front end"
        error = ReplicaDeadError(client, f"no heartbeat from its process on {where}")
        if self.recovery.on:
            self.absent.silent(pool, replica_id, address, client)
            pool.detach(replica_id)
            self.recovery.died(pool, replica_id, error)
        else:
            self.spawn(self._handle_dead_replica(pool.stage_id, replica_id, error))

    async def forget_items(self, stage_id: int) -> None:
        """Clear the cache of sent items, since a new replica of the stage has none of them."""
        downstream = self._stage_input_processors.get(stage_id)
        processor = self.first_input_processor if stage_id == 0 else downstream
        if processor is not None:
            await processor.renderer.clear_mm_cache_async()

    # ---- background tasks

    def _emit_tx_edge(self, *, from_stage: int, to_stage: int, tx_ms: float, **others: Any) -> None:
        self.driver.monitor.sent(from_stage, to_stage, tx_ms / 1e3)
        super()._emit_tx_edge(from_stage=from_stage, to_stage=to_stage, tx_ms=tx_ms, **others)

    def _background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._background_tasks(), self._watch()]

    async def _watch(self) -> None:
        while not self._shutdown_event.is_set():
            await asyncio.sleep(CHECK_SECONDS)
            self.driver.monitor.check(self.stage_pools, self.clock())
            await self.liveness.check(self.stage_pools, self.clock())
            self.hang_detector.check(self.clock())
            self.stall_guard.check(self.clock())
            self.absent.check(self.clock())
            self.migrator.tick()
            self.driver.check(self.clock())
            if self.layout is not None:
                self.layout.check(self.stage_pools, self.clock())
            if self.driver.forecaster is not None:
                self.driver.forecaster.check(self.clock(), self._prepare_for_load)
            await self.release()  # also for recovery, whose time may have come

    def _prepare_for_load(self, rates: Mapping[int, float], tested: bool) -> None:
        self.driver.prepare(rates, tested, self.migrator, self.clock())

    async def _shutdown_extensions(self) -> None:
        self.migrator.close()
        for task in self._spawned:
            task.cancel()
        await super()._shutdown_extensions()
        self.absent.close()
        self.payloads.close()
        self._publisher.close()
        await asyncio.get_running_loop().run_in_executor(None, self.driver.close)  # it may wait for the disk

    def _shutdown_stages(self) -> None:
        super()._shutdown_stages()
        self.payloads.remove_left()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine beside the event loop; its errors are logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._spawned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(
                "background task %s of the orchestrator failed; its work is not repeated",
                task.get_name(),
                exc_info=error,
            )

    def _streams(self, request_id: str) -> bool:
        state = self.request_states.get(request_id)
        return state is not None and state.streaming.enabled

    def _output_kind(self, request_id: str, stage_id: int) -> RequestOutputKind | None:
        state = self.request_states.get(request_id)
        return getattr(state.sampling_params_list[stage_id], "output_kind", None) if state is not None else None


def renamed(output: Any, request_id: str) -> Any:
    """Return the output under the name of another request."""
    if output.request_id == request_id:
        return output
    its = copy.copy(output)
    its.request_id = request_id
    return its
