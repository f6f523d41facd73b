"""Mixin for workers with model runner V1: windows for any item list, and session messages."""

from copy import copy
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_sched import compat
from vllm_omni_sched.config import OmniSchedConfig, Toggle
from vllm_omni_sched.engine.ahead_runner import keep_what_is_freed, start_lane, wait_when_idle
from vllm_omni_sched.engine.mrope import MropeAppendMixin
from vllm_omni_sched.engine.session import ResumedRequestData, SessionReceiver
from vllm_omni_sched.items import FeatureWindows


class RunnerV1Mixin(MropeAppendMixin):
    """Mixin for the class of a live V1 ``GPUModelRunner`` (runners for CPU, XPU … are subclasses of it).

    It has no ``__init__``: `omni_prepare` is called once on the instance.
    """

    def omni_prepare(self, config: OmniSchedConfig) -> None:
        """Set up our attributes of the runner; nothing of vLLM's is changed."""
        strip_one = compat.strip_feature()
        self._omni_config = config
        self._omni_ahead: Any = None
        uses_mrope = bool(self.uses_mrope)
        self._omni_receiver = SessionReceiver(lambda feature: strip_one(feature, uses_mrope))
        self._omni_windows = FeatureWindows()
        self._omni_narrow = config.windows is not Toggle.OFF
        self._omni_native_gather = compat.native_windows(compat.RUNNER_V1)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._omni_ahead = start_lane(self)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(scheduler_output, *args, **kwargs)
        if self._omni_ahead is None or scheduler_output.total_num_scheduled_tokens:
            return output
        # vLLM does not run a connector of this role in a step without tokens.
        with self.maybe_get_ec_connector_output(scheduler_output, encoder_cache=self.encoder_cache) as report:
            wait_when_idle(self._omni_ahead, scheduler_output)
        output = copy(output)  # it may be the empty output that all steps share
        output.ec_connector_output = report
        return output

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        keep_what_is_freed(self._omni_ahead, scheduler_output, self.encoder_cache)
        self._omni_receiver.expand(scheduler_output)
        self._omni_windows.forget(scheduler_output.finished_req_ids)
        running = scheduler_output.scheduled_cached_reqs
        if isinstance(running, ResumedRequestData):
            for request_id, restored in running.restored.items():
                self._omni_receiver.restore(request_id, restored, self.requests[request_id].mm_features)
        return super()._update_states(scheduler_output)

    def _gather_mm_embeddings(
        self, scheduler_output: SchedulerOutput, shift_computed_tokens: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Gather, by vLLM's method, from the items of this step's window, where its own search would be linear or
        wrong.
        """
        narrowed: list[tuple[Any, list[Any]]] = []
        for request_id in self.input_batch.req_ids if self._omni_narrow else ():
            state = self.requests[request_id]
            features = state.mm_features
            if not features:
                continue
            index = self._omni_windows.index_of(request_id, features)
            if self._omni_native_gather and index.sequential:
                continue
            start = state.num_computed_tokens + shift_computed_tokens
            ids = index.overlapping(start, start + scheduler_output.num_scheduled_tokens[request_id])
            narrowed.append((state, features))
            state.mm_features = [features[i] for i in ids]
        try:
            return super()._gather_mm_embeddings(scheduler_output, shift_computed_tokens)
        finally:
            for state, features in narrowed:
                state.mm_features = features
