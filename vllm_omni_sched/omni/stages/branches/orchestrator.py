"""Route requests through stages that branch, as their flows say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar

from vllm_omni.engine.messages import OutputMessage
from vllm_omni.engine.orchestrator import _build_terminal_empty_output

from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.graph.flow import RequestFlow, StagePhase
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.stages.branches.inputs import JoinedOutput, take_joined_outputs
from vllm_omni_sched.omni.stages.branches.payloads import EdgePayloads
from vllm_omni_sched.omni.stages.branches.recovery_driver import BranchRecoveryDriver
from vllm_omni_sched.omni.stages.branches.sharing import BranchSharing
from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator, renamed

logger = get_logger(__name__)

UNSUPPORTED = "streaming input needs stages that are a line, and the stages of this pipeline branch"


_STARTED_NOW: ContextVar[frozenset[int]] = ContextVar("_STARTED_NOW", default=frozenset())
"""The stages that vLLM-Omni's `_prewarm_async_chunk_stages` is called for."""


class BranchingOrchestrator(ScheduledOrchestrator):
    """Runs a pipeline whose stages are more than a line.

    vLLM-Omni passes each output on to the stage with the next id; here the core says to which stages a request goes on
    when one has ended (`Proceeds`), and vLLM-Omni's method is called for each of these as if it were the next. Stages
    that read chunks start together with those that send them, as vLLM-Omni starts all stages of a line.
    """

    REPLACES: ClassVar = (
        "_forward_to_next_stage",
        "_next_stage_already_submitted",
        "_build_payload_sender_info",
        "_stage_receives_async_chunks",
    )
    """Methods of vLLM-Omni that are not called here; without them, the ones here would never be called."""

    payloads: EdgePayloads
    sharing: BranchSharing
    recovery: BranchRecoveryDriver

    def _add_parts(self, runtime: Any) -> None:
        self._starts: dict[tuple[str, int], tuple[int, ...]] = {}  # by request and the stage that has ended
        self._kept: dict[str, dict[int, Any]] = {}  # outputs that stages with several sources need, by request
        self._came_from: dict[tuple[str, int], int] = {}  # stage that a request comes from, by the one it goes to
        self._sent_to: dict[str, dict[int, dict[int, str]]] = {}  # runs that get the output of a run, by its stage
        self._first_requests: dict[str, Any] = {}  # as sent to the first stage, while stages that read chunks wait
        graph = self.driver.graph
        self._joins = {stage.stage_id: stage.sources for stage in graph.stages if len(stage.sources) > 1}
        self._needed_by_joins = {source for sources in self._joins.values() for source in sources}
        self.payloads = EdgePayloads(self.stage_pools)
        self.sharing = BranchSharing(self, self.payloads)
        self.recovery = BranchRecoveryDriver(self, runtime, self.payloads)
        self.driver.proceeds = self._proceeds

    # ---- what the parts ask

    def _flow(self, request_id: str) -> RequestFlow | None:
        known = self.driver.known.get(request_id)
        return None if known is None else known.flow

    def targets(self, stage_id: int, request_id: str) -> Mapping[int, str]:
        """Return the suffixes of the runs that get the output of a request that is being sent to a stage, by stage."""
        work = self.stage_pools[stage_id].queue.running.get(request_id)  # its request may have left
        flow = self._flow(request_id) if work is None else work.known.flow
        if flow is None or flow.phase(stage_id) is None:
            return {}
        sent_for = [one for one in flow.send(stage_id) if self.payloads.carries((stage_id, one))]
        runs = {one: self.run_name(request_id, one) for one in sent_for}
        self._sent_to.setdefault(request_id, {})[stage_id] = runs
        return {target: name[len(request_id) :] for target, name in runs.items()}

    def sent_to(self, request_id: str, stage_id: int) -> Mapping[int, str]:
        """Return the names of the runs to which the last run of a stage sends its output, by their stages.

        Args:
            request_id: the request in whose name the stage runs; it may have left.
        """
        return self._sent_to.get(request_id, {}).get(stage_id, {})

    def whole_sent_to(self, request_id: str, stage_id: int) -> Mapping[int, str]:
        """Return those of `sent_to` that get the output as one payload, and not in chunks."""
        sent_to = self.sent_to(request_id, stage_id)
        return {one: name for one, name in sent_to.items() if not self.driver.graph.stage(one).reads_chunks}

    def forget_runs(self, request_id: str) -> None:
        """Forget the runs of a request of which no work goes on."""
        self._sent_to.pop(request_id, None)

    def run_name(self, request_id: str, stage_id: int) -> str:
        """Return the name of the present run of a request in a stage, as connectors know it."""
        names = self.stage_pools[stage_id].names
        return request_id if names is None else names.external(request_id)

    # ---- requests

    async def _handle_add_request(self, msg: Any) -> None:
        if getattr(msg.prompt, "resumable", False):
            await self._fail_request_client_error(msg.request_id, 0, UNSUPPORTED)
            return
        await super()._handle_add_request(msg)

    def _proceeds(self, action: e.Proceeds) -> None:
        if action.stage_id is not None and action.starts:
            self._starts[action.request_id, action.stage_id] = action.starts

    def _next_stage_already_submitted(self, stage_id: int, req_state: Any) -> bool:
        return False  # whether a stage starts, and once, is decided by the flow

    def _stage_receives_async_chunks(self, stage_id: int) -> bool:
        return stage_id in _STARTED_NOW.get()  # the flow says what starts, and when an output is passed on

    async def _prewarm_async_chunk_stages(self, request_id: str, stage0_request: Any, req_state: Any) -> bool:
        """Start the stages of a request that read chunks, as far as all that they read have started."""
        flow = self._flow(request_id)
        chunked = (
            [] if flow is None else [(one, flow.phase(one)) for one in flow.plan.stages if one in flow.plan.chunked]
        )
        if any(phase is StagePhase.WAITS for _, phase in chunked):
            self._first_requests[request_id] = stage0_request
        starts = [one for one, phase in chunked if phase is StagePhase.STARTED and one not in req_state.stage_submit_ts]
        for stage_id in starts:
            self._came_from[request_id, stage_id] = self.driver.graph.stage(stage_id).sources[0]
        token = _STARTED_NOW.set(frozenset(starts))
        try:
            return bool(await super()._prewarm_async_chunk_stages(request_id, stage0_request, req_state))
        finally:
            _STARTED_NOW.reset(token)

    async def _handle_processed_outputs(self, stage_id: int, replica_id: int, outputs: list[Any]) -> None:
        if stage_id in self._needed_by_joins:
            for output in outputs:
                for name in self.stage_pools[stage_id].queue.receivers(output.request_id):
                    if output.finished and name in self.request_states:
                        self._kept.setdefault(name, {})[stage_id] = renamed(output, name)
        await super()._handle_processed_outputs(stage_id, replica_id, outputs)

    async def _forward_to_next_stage(
        self, req_id: str, src_stage_id: int, output: Any, req_state: Any, **more: Any
    ) -> None:
        starts = self._starts.pop((req_id, src_stage_id), ())
        reading = [one for one in starts if self.driver.graph.stage(one).reads_chunks]
        for stage_id in starts:
            if stage_id not in reading:
                await self._forward_to(stage_id, req_id, src_stage_id, output, req_state, more)
        if reading and self.request_states.get(req_id) is req_state:
            await self._prewarm_async_chunk_stages(req_id, self._first_requests[req_id], req_state)

    async def _forward_to(
        self, stage_id: int, req_id: str, source: int, output: Any, req_state: Any, more: dict[str, Any]
    ) -> None:
        if self.request_states.get(req_id) is not req_state:
            return  # it failed while it was sent to another stage

        async def forward() -> None:
            await self._forward_to(stage_id, req_id, source, output, req_state, more)

        if self.recovery.parking.park(stage_id, forward, req_id):
            return
        self.stall_guard.progressed([req_id])
        if stage_id in self._joins:
            kept = self._kept[req_id]
            output = JoinedOutput([kept[one] for one in self._joins[stage_id]])
            for client in self.stage_pools[stage_id].clients:
                if client is not None:
                    take_joined_outputs(client)
        self._came_from[req_id, stage_id] = source
        # to vLLM-Omni, the stage before the one with this id has ended
        to_next = super(ScheduledOrchestrator, self)._forward_to_next_stage(
            req_id, stage_id - 1, output, req_state, **more
        )
        await self.recovery.forwarding_to(req_id, stage_id, to_next)

    def _build_payload_sender_info(self, sender_stage_id: int, *, request_id: str | None = None) -> None:
        return None  # connectors that need it are refused at the start

    def _emit_tx_edge(self, *, from_stage: int, to_stage: int, tx_ms: float, **others: Any) -> None:
        source = self._came_from.pop((others["request_id"], to_stage), from_stage)
        super()._emit_tx_edge(from_stage=source, to_stage=to_stage, tx_ms=tx_ms, **others)

    async def _cleanup_request_ids(
        self, request_ids: list[str], *, abort: bool = False, release_owners: bool = False
    ) -> list[Any]:
        outputs: list[Any] = await super()._cleanup_request_ids(request_ids, abort=abort, release_owners=release_owners)
        for request_id in request_ids:
            self._kept.pop(request_id, None)
            self._first_requests.pop(request_id, None)
            for stage_id in range(self.num_stages):
                self._starts.pop((request_id, stage_id), None)
                self._came_from.pop((request_id, stage_id), None)
        return outputs

    # ---- errors of one branch

    async def _fail_request_dead_stage(self, req_id: str, stage_id: int) -> None:
        if not await self.goes_on_without(stage_id, req_id, f"Stage-{stage_id} has no live replica"):
            await super()._fail_request_dead_stage(req_id, stage_id)

    async def goes_on_without(self, stage_id: int, request_id: str, why: str) -> bool:
        now = self.clock()
        for action in self.driver.handle(e.StageFailed(stage_id, request_id), now):
            if isinstance(action, e.Fails) and not action.whole and request_id in self.request_states:
                logger.warning(
                    "request %s goes on without the outputs of stages %s: stage %d failed for it: %s",
                    request_id,
                    list(action.outputs),
                    stage_id,
                    why,
                )
                await self._drop(action, why)
                return True
        return False

    async def _drop(self, action: e.Fails, why: str) -> None:
        request_id = action.request_id
        state = self.request_states.get(request_id)
        for stage_id in action.stages:
            pool = self.stage_pools[stage_id]
            orphan = pool.queue.detach(request_id)
            await pool.abort_requests([request_id])
            pool.release_binding(request_id)
            pool.queue.drop(request_id)
            if orphan is not None:
                await pool.abort_orphan(orphan.request_id, orphan.replica_id)
            self.recovery.parking.forget(request_id, stage_id)
            self.recovery.handovers.arrived(request_id, stage_id)
            self.sharing.unneeded(request_id, stage_id)
            if state is not None:
                state.stage_submit_ts.pop(stage_id, None)  # vLLM-Omni waits for the ends of all that are in it
        if state is None or self.request_states.get(request_id) is not state:
            return
        for number, stage_id in enumerate(action.outputs, 1):
            state.finished_final_output_stage_ids.add(stage_id)
            ends = action.over and number == len(action.outputs) and state.pending_final_output is None
            await self.output_async_queue.put(_failed_output(self.stage_pools[stage_id], request_id, why, ends))
        if action.over:
            pending, state.pending_final_output = state.pending_final_output, None
            if pending is not None:
                await self.output_async_queue.put(pending)
            await self._cleanup_request_ids([request_id, *self._cfg_tracker.cleanup_parent(request_id)])
        else:
            await self.release()


def _failed_output(pool: Any, request_id: str, why: str, ends: bool) -> OutputMessage:
    """Return an empty output that says why it is empty; ``ends``: it is the last one of its request."""
    kind = getattr(pool.stage_client, "final_output_type", None)
    infer: Callable[[], int] = pool._infer_audio_sample_rate
    output = _build_terminal_empty_output(
        request_id, final_output_type=kind, **({"audio_sample_rate": infer()} if kind == "audio" else {})
    )
    output.outputs[0].finish_reason, output.outputs[0].stop_reason = "error", why
    return OutputMessage(
        request_id=request_id,
        stage_id=pool.stage_id,
        replica_id=None,
        engine_outputs=output,
        metrics=None,
        finished=ends,
    )
