"""Mixin for workers with model runner V1: windows for any item list, session messages, continued positions, and seeds
on CPUs.
"""

from contextlib import nullcontext
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_sched import compat
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.ahead.runner_hooks import (
    forget_encodings,
    keep_what_is_freed,
    start_lane,
    wait_when_idle,
)
from vllm_omni_sched.engine.runners.extension import RunnerV1Extension
from vllm_omni_sched.engine.runners.mrope import SessionPositions, continues
from vllm_omni_sched.engine.sessions.messages import ResumedRequestData

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Base
else:
    _Base = object  # it is mixed into the class of a live runner


class RunnerV1Mixin(_Base):
    """Mixin for the class of a live V1 ``GPUModelRunner`` (runners for CPU, XPU … are subclasses of it)."""

    omni: RunnerV1Extension

    def omni_prepare(self, config: OmniSchedConfig) -> None:
        """Make our extension of the runner; nothing of vLLM's is changed."""
        self.omni = RunnerV1Extension(config, uses_mrope=bool(self.uses_mrope))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if continues(self.omni.config, self.vllm_config, self.get_model()):
            self.omni.positions = SessionPositions()
        self.omni.ahead = start_lane(self)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(scheduler_output, *args, **kwargs)
        if self.omni.ahead is None or scheduler_output.total_num_scheduled_tokens:
            return output
        # vLLM does not run a connector of this role in a step without tokens.
        with self.maybe_get_ec_connector_output(scheduler_output, encoder_cache=self.encoder_cache) as report:
            wait_when_idle(self.omni.ahead, scheduler_output)
        output = copy(output)  # it may be the empty output that all steps share
        output.ec_connector_output = report
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, by vLLM's method, without the generators of requests whose prompt goes on.

        What is sampled for these is discarded, so that vLLM rewinds their generators, which those of CPUs do not allow.
        """
        generators = self.input_batch.generators
        if not generators or self.device.type != "cpu" or not compat.rewinds_by_offset():
            return super().sample_tokens(*args, **kwargs)
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        aside = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(aside)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        omni = self.omni
        keep_what_is_freed(omni.ahead, scheduler_output, self.encoder_cache)
        omni.receiver.expand(scheduler_output)
        omni.windows.forget(scheduler_output.finished_req_ids)
        if omni.positions is not None:
            omni.positions.forget(scheduler_output.finished_req_ids)
        running = scheduler_output.scheduled_cached_reqs
        if isinstance(running, ResumedRequestData):
            for request_id, restored in running.restored.items():
                omni.receiver.restore(request_id, restored, self.requests[request_id].mm_features)
        return super()._update_states(scheduler_output)

    def _execute_mm_encoder(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.omni.ahead is None else self.omni.ahead.in_step():
            return super()._execute_mm_encoder(*args, **kwargs)

    def _gather_mm_embeddings(
        self, scheduler_output: SchedulerOutput, shift_computed_tokens: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Gather, by vLLM's method, from the items of this step's window, where its own search would be linear or
        wrong.
        """
        windows = self.omni.windows
        narrowed: list[tuple[Any, list[Any]]] = []
        for request_id in self.input_batch.req_ids if windows.narrows else ():
            state = self.requests[request_id]
            start = state.num_computed_tokens + shift_computed_tokens
            num_tokens = scheduler_output.num_scheduled_tokens[request_id]
            shown = windows.shown(request_id, state.mm_features, start, num_tokens)
            if shown is not None:
                narrowed.append((state, state.mm_features))
                state.mm_features = shown
        try:
            return super()._gather_mm_embeddings(scheduler_output, shift_computed_tokens)
        finally:
            for state, features in narrowed:
                state.mm_features = features

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        forget_encodings()

    def _init_mrope_positions(self, req_state: Any) -> None:
        if self.omni.positions is None:
            super()._init_mrope_positions(req_state)
        else:
            self.omni.positions.init(super()._init_mrope_positions, req_state)
