"""Model runner V2 without a model: vLLM's own classes, and without a GPU numpy where its kernels would write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.states import RequestState

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.runners.extension import mix_in
from vllm_omni_sched.engine.runners.v2 import RunnerV2Mixin, promote_encoder_runner

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_TOKENS = 4096


class States:
    """Stands for V2's `ModelState`: keeps the tokens that it is told, and owns the encoder runner."""

    def __init__(self, encoder_runner: EncoderRunner) -> None:
        self.encoder_runner = encoder_runner
        self.tokens: dict[int, list[int]] = {}

    def add_request(self, index: int, new: Any) -> None:
        self.tokens[index] = list(new.prefill_token_ids)

    def remove_request(self, request_id: str) -> None:
        pass

    def apply_staged_writes(self) -> None:
        pass


def make_runner(*, ours: bool, device: torch.device = CPU) -> GPUModelRunner:
    runner = object.__new__(GPUModelRunner)
    runner.vllm_config = SimpleNamespace(model_config=SimpleNamespace(uses_mrope=False))
    runner.req_states = RequestState(
        max_num_reqs=8,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=512,
        num_speculative_steps=0,
        vocab_size=32_000,
        device=device,
    )
    blocks = MAX_TOKENS // BLOCK_SIZE
    runner.block_tables = BlockTables([BLOCK_SIZE], 8, 512, [blocks], device, [BLOCK_SIZE])
    runner.encoder_cache = EncoderCache()
    runner.model_state = States(EncoderRunner(torch.nn.Module(), 1, 1, runner.encoder_cache, torch.float32, device))
    runner.lora_state = mock.Mock()
    for name in ("adaptive_verification", "pooling_runner", "pp_handler", "sampler", "prompt_logprobs_worker"):
        setattr(runner, name, None)
    runner.is_last_pp_rank = False  # the last one has a sampler
    if ours:
        mix_in(runner, RunnerV2Mixin, OmniSchedConfig())
        promote_encoder_runner(runner, OmniSchedConfig())
    return runner


def apply_write(tensor: StagedWriteTensor) -> None:
    """Write the staged rows into a tensor, as the GPU kernel `_apply_write_kernel` does."""
    first = 0
    rows = tensor.gpu if tensor.gpu.ndim == 2 else tensor.gpu.unsqueeze(1)
    for row, start, end in zip(
        tensor._staged_write_indices, tensor._staged_write_starts, tensor._staged_write_cu_lens, strict=True
    ):
        contents = torch.tensor(tensor._staged_write_contents[first:end], dtype=tensor.dtype)
        rows[row, start : start + len(contents)] = contents
        first = end
    tensor.clear_staged_writes()


def take(runner: GPUModelRunner, scheduled: Any) -> None:
    """Do what the runner does with a step before it runs the model, in the same order."""
    runner.finish_requests(scheduled)
    runner.free_states(scheduled)
    runner.add_requests(scheduled)
    runner.update_requests(scheduled)
    for request_id, updates in getattr(scheduled, "encoder_input_updates", {}).items():  # vLLM 0.33 on
        runner.encoder_cache.update_encoder_inputs(request_id, updates)
    runner.block_tables.apply_staged_writes()


@contextmanager
def without_gpu() -> Iterator[None]:
    with (
        mock.patch.object(StagedWriteTensor, "apply_write", apply_write),
        mock.patch("vllm.v1.worker.gpu.buffer_utils.is_uva_available", return_value=False),  # no pinned memory here
    ):
        yield
