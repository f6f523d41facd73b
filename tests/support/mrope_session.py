"""Keep a session as a worker's mirror has it, and a runner that counts the calls of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.support.mrope import Piece
from vllm_omni_sched import compat
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.runners.extension import mix_in
from vllm_omni_sched.engine.runners.v1 import RunnerV1Mixin
from vllm_omni_sched.items import SessionMirror
from vllm_omni_sched.items.session import SessionUpdate

QWEN2 = "qwen2_vl.Qwen2VLForConditionalGeneration"
STRIP = compat.strip_feature()


def vllm_config(**changed: Any) -> SimpleNamespace:
    multimodal = SimpleNamespace(is_multimodal_pruning_enabled=lambda: changed.get("pruning", False))
    return SimpleNamespace(
        model_config=SimpleNamespace(uses_mrope=changed.get("uses_mrope", True), multimodal_config=multimodal),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp", pipeline_parallel_size=1),
    )


class Runner:
    """vLLM's own method, and how many tokens it was asked about."""

    uses_mrope = True

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vllm_config = vllm_config()
        self.asked: list[int] = []

    def get_model(self) -> Any:
        return self.model

    def load_model(self) -> None:
        pass

    def _init_mrope_positions(self, req_state: Any) -> None:
        self.asked.append(len(req_state.prompt_token_ids))
        GPUModelRunner._init_mrope_positions(self, req_state)

    def _update_states(self, scheduler_output: Any) -> None:
        pass


def make_runner(model: Any, **options: Any) -> Any:
    runner = Runner(model)
    mix_in(runner, RunnerV1Mixin, OmniSchedConfig(**options))
    runner.load_model()
    return runner


class Session:
    """A session as a worker's mirror has it, fed with pieces."""

    def __init__(self, request_id: str = "a") -> None:
        self.mirror = SessionMirror((), (), (), 0)
        self.state = CachedRequestState(
            req_id=request_id,
            prompt_token_ids=[],
            mm_features=[],
            sampling_params=None,
            generator=None,
            block_ids=(),
            num_computed_tokens=0,
            output_token_ids=[],
        )
        self.restart()

    def restart(self) -> None:
        """Send the whole session again."""
        old = self.mirror
        self.mirror = SessionMirror(old.tokens, old.features, (), old.covered)
        self.state.prompt_token_ids, self.state.mm_features = self.mirror.tokens, self.mirror.features

    def add(self, pieces: list[Piece], covered: int | None = None) -> None:
        tokens: list[int] = []
        features = []
        for piece in pieces:
            if piece.modality is not None:
                name = str(len(self.mirror.features) + len(features))
                features.append(piece.feature(len(self.mirror.tokens) + len(tokens), name))
            tokens += piece.tokens
        self.add_raw(tokens, features, covered)

    def add_raw(self, tokens: list[int], features: list[Any], covered: int | None = None) -> None:
        covered = self.mirror.covered if covered is None else covered
        before = (len(self.mirror.tokens), len(self.mirror.features), ())
        update = SessionUpdate(*before, tokens, (), (), covered, {})
        self.mirror.apply(update, features, lambda feature: STRIP(feature, True))

    def expected(self, model: Any) -> tuple[torch.Tensor, int]:
        return model.get_mrope_input_positions(list(self.mirror.tokens), list(self.mirror.features))

    def check(self, model: Any) -> None:
        positions, delta = self.expected(model)
        assert self.state.mrope_positions.dtype == positions.dtype
        assert torch.equal(self.state.mrope_positions, positions)
        assert self.state.mrope_position_delta == delta
