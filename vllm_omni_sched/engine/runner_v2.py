"""Mixins for workers with model runner V2, which do what the V1 mixin does, on V2's own classes."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_sched import compat
from vllm_omni_sched.config import OmniSchedConfig, Toggle
from vllm_omni_sched.engine.ahead_runner import keep_what_is_freed, start_lane, wait_when_idle
from vllm_omni_sched.engine.session import SessionReceiver
from vllm_omni_sched.items import FeatureWindows


class EncoderRunnerMixin:
    """Mixin for the class of a live V2 ``EncoderRunner``."""

    def omni_prepare(self, config: OmniSchedConfig) -> None:
        self._omni_windows = FeatureWindows()
        self._omni_narrow = config.windows is not Toggle.OFF
        self._omni_native_gather = compat.native_windows(compat.ENCODER_RUNNER_V2)
        # Later versions have an argument draft_lookahead: bind the arguments of this version by name.
        self._omni_signature = inspect.signature(super().gather_mm_embeddings)

    def gather_mm_embeddings(self, *args: Any, **kwargs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Gather, by vLLM's method, from the items of this step's window, where its own search would be linear or
        wrong.
        """
        call = self._omni_signature.bind(*args, **kwargs).arguments
        lookahead = call.get("draft_lookahead", 0)
        features_of = self.encoder_cache.mm_features
        narrowed = {}
        for i, request_id in enumerate(call["req_ids"] if self._omni_narrow else ()):
            features = features_of.get(request_id)
            if not features:
                continue
            index = self._omni_windows.index_of(request_id, features)
            if self._omni_native_gather and index.sequential:
                continue
            start = int(call["num_computed_tokens"][i]) + lookahead
            ids = index.overlapping(start, start + int(call["num_scheduled_tokens"][i]))
            narrowed[request_id] = features
            features_of[request_id] = [features[k] for k in ids]
        try:
            return super().gather_mm_embeddings(*args, **kwargs)
        finally:
            features_of.update(narrowed)


class ECConnectorMixin:
    """Mixin for the class of a live V2 ``ActiveECConnector``, which runs the connector's life cycle in every step."""

    def omni_prepare(self, config: OmniSchedConfig) -> None:
        """Do nothing: this mixin has no state."""

    @contextmanager
    def maybe_get_output(self, scheduler_output: SchedulerOutput) -> Iterator[Any]:
        """Run vLLM's method; in a step without tokens, wait for an encode before the connector reports."""
        with super().maybe_get_output(scheduler_output) as output:
            yield output
            wait_when_idle(self.ec_connector.worker, scheduler_output)


class RunnerV2Mixin:
    """Mixin for the class of a live V2 ``GPUModelRunner``."""

    def omni_prepare(self, config: OmniSchedConfig) -> None:
        strip_one = compat.strip_feature()
        self._omni_config = config
        self._omni_ahead: Any = None
        uses_mrope = bool(self.vllm_config.model_config.uses_mrope)
        self._omni_receiver = SessionReceiver(lambda feature: strip_one(feature, uses_mrope))

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_model(*args, **kwargs)
        from vllm_omni_sched.engine.promote import mix_in, promote_encoder_runner, promote_rope_state

        promote_encoder_runner(self, self._omni_config)
        promote_rope_state(self, self._omni_config)
        self._omni_ahead = start_lane(self)
        if self._omni_ahead is not None:
            mix_in(self.ec_connector, ECConnectorMixin, self._omni_config)
        return result

    def free_states(self, scheduler_output: SchedulerOutput) -> Any:
        if self.encoder_cache is not None:
            keep_what_is_freed(self._omni_ahead, scheduler_output, self.encoder_cache.encoder_outputs)
        return super().free_states(scheduler_output)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> Any:
        encoder_runner = compat.encoder_runner_of(self)
        if isinstance(encoder_runner, EncoderRunnerMixin):
            encoder_runner._omni_windows.forget(scheduler_output.finished_req_ids)
        return super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> Any:
        self._omni_receiver.expand(scheduler_output)
        return super().add_requests(scheduler_output)
