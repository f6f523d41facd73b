"""Mixins for workers with model runner V2, which do what the V1 mixin does, on V2's own classes."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
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
from vllm_omni_sched.engine.runners.extension import GatherWindows, RunnerExtension, mix_in
from vllm_omni_sched.engine.runners.mrope import RowPositions, continues, refuse_if_on

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.ec_connector import ActiveECConnector as _ECConnector
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner as _EncoderRunner
    from vllm.v1.worker.gpu.mm.rope import RopeState as _RopeState
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Runner
else:
    _ECConnector = _EncoderRunner = _RopeState = _Runner = object  # they are mixed into the classes of live objects


class EncoderRunnerMixin(_EncoderRunner):
    """Mixin for the class of a live V2 ``EncoderRunner``."""

    omni: GatherWindows

    def omni_prepare(self, config: OmniSchedConfig) -> None:
        self.omni = GatherWindows(config, compat.ENCODER_RUNNER_V2)
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
        for i, request_id in enumerate(call["req_ids"] if self.omni.narrows else ()):
            features = features_of.get(request_id)
            start = int(call["num_computed_tokens"][i]) + lookahead
            shown = self.omni.shown(request_id, features, start, int(call["num_scheduled_tokens"][i]))
            if shown is not None:
                narrowed[request_id] = features
                features_of[request_id] = shown
        try:
            return super().gather_mm_embeddings(*args, **kwargs)
        finally:
            features_of.update(narrowed)


class RopeStateMixin(_RopeState):
    """Mixin for the class of a live V2 ``RopeState``, which writes positions of a session behind those in its row."""

    omni: RowPositions

    def omni_prepare(self, config: OmniSchedConfig) -> None:
        self.omni = RowPositions()

    def init_prefill_positions(self, req_idx: int, model: Any, prefill_token_ids: Any, mm_features: list[Any]) -> None:
        self.omni.init(self, super().init_prefill_positions, req_idx, model, prefill_token_ids, mm_features)


class ECConnectorMixin(_ECConnector):
    """Mixin for the class of a live V2 ``ActiveECConnector``, which runs the connector's life cycle in every step."""

    def omni_prepare(self, config: OmniSchedConfig) -> None:
        """Do nothing: this mixin has no state."""

    @contextmanager
    def maybe_get_output(self, scheduler_output: SchedulerOutput) -> Iterator[Any]:
        """Run vLLM's method; in a step without tokens, wait for an encode before the connector reports."""
        with super().maybe_get_output(scheduler_output) as output:
            yield output
            wait_when_idle(self.ec_connector.worker, scheduler_output)


class RunnerV2Mixin(_Runner):
    """Mixin for the class of a live V2 ``GPUModelRunner``."""

    omni: RunnerExtension

    def omni_prepare(self, config: OmniSchedConfig) -> None:
        self.omni = RunnerExtension(config, uses_mrope=bool(self.vllm_config.model_config.uses_mrope))

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_model(*args, **kwargs)
        config = self.omni.config
        promote_encoder_runner(self, config)
        promote_rope_state(self, config)
        self.omni.ahead = start_lane(self)
        if self.omni.ahead is not None:
            mix_in(self.ec_connector, ECConnectorMixin, config)
        return result

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        forget_encodings()

    def free_states(self, scheduler_output: SchedulerOutput) -> Any:
        if self.encoder_cache is not None:
            keep_what_is_freed(self.omni.ahead, scheduler_output, self.encoder_cache.encoder_outputs)
        return super().free_states(scheduler_output)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> Any:
        encoder_runner = compat.encoder_runner_of(self)
        if isinstance(encoder_runner, EncoderRunnerMixin):
            encoder_runner.omni.forget(scheduler_output.finished_req_ids)
        return super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> Any:
        self.omni.receiver.expand(scheduler_output)
        return super().add_requests(scheduler_output)


def promote_encoder_runner(runner: Any, config: OmniSchedConfig) -> None:
    """Add our mixin to the encoder runner of a V2 model runner, once the model is loaded."""
    encoder_runner = compat.encoder_runner_of(runner)
    if encoder_runner is not None:
        mix_in(encoder_runner, EncoderRunnerMixin, config)


def promote_rope_state(runner: Any, config: OmniSchedConfig) -> None:
    """Add our mixin to the M-RoPE state of a V2 model runner, once the model is loaded.

    Raises:
        ConfigError: positions of this model cannot be continued, and the option is ``on``.
    """
    if not continues(config, runner.vllm_config, runner.model):
        return
    rope_state = getattr(runner.model_state, "rope_state", None)
    if rope_state is not None:
        mix_in(rope_state, RopeStateMixin, config)
    else:
        refuse_if_on(config, f"{type(runner.model_state).__qualname__} keeps no M-RoPE positions")
