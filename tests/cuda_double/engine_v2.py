"""Encode-ahead on model runner V2 with tensors on a device: the engine of `ahead_v2`, without its stand-ins for CUDA.

vLLM's own here, beside what is there: the states of requests and blocks on the device, `EncoderRunner`, and
`DefaultModelState.prepare_inputs_embeds`, which encodes, gathers and merges. Stand-ins: the batch, which kernels of
Triton would make, and the model, whose embeddings are the same numbers on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from tests.engine.harness.ahead_v2 import EMBEDS, Engine
from tests.engine.harness.gather import gathered
from tests.engine.harness.runner_v2 import MAX_TOKENS, make_runner

CUDA = torch.device("cuda", 0)
HIDDEN = 1024
VOCABULARY = 2048


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5 + number, HIDDEN), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


class Language(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = torch.arange(VOCABULARY * HIDDEN, dtype=torch.float32).view(VOCABULARY, HIDDEN) / HIDDEN
        self.embeddings = torch.nn.Embedding.from_pretrained(rows)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embeddings(input_ids)
        return found


class Model(torch.nn.Module, SupportsMultiModal):
    """Model with an encoder of three layers that multiply and add, element by element: exact on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = Language()
        self.layers = torch.nn.ModuleList(Layer(number) for number in range(3))
        rows = torch.arange(EMBEDS * HIDDEN, dtype=torch.float32).view(1, EMBEDS, HIDDEN) / HIDDEN
        self.rows = torch.nn.Parameter(rows, requires_grad=False)

    def get_language_model(self) -> Any:
        return self.language_model

    def embed_multimodal(self, values: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.rows + values.float().view(-1, 1, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return list(hidden)


class States(DefaultModelState):
    """vLLM's own states of a multimodal model, made without its configuration."""

    def __init__(self, encoder_runner: EncoderRunner) -> None:
        self.encoder_runner = encoder_runner
        self.encoder_cache = encoder_runner.encoder_cache
        self.supports_mm_inputs = True
        self.rope_state = self.prompt_embeds_state = self.mm_pruner = None


class Embedded(NamedTuple):
    """The inputs of the language model in one step, on the device, and what they should be.

    Attributes:
        tokens: by request, its prompt from the first token of the step on.
        rows: embeddings of items, in the order of their tokens.
        mask: which tokens take them.
    """

    inputs: torch.Tensor
    ids: torch.Tensor
    tokens: dict[str, tuple[int, list[int]]]
    rows: torch.Tensor
    mask: torch.Tensor


def nothing() -> None:
    """Do nothing."""


class DeviceEngine(Engine):
    """Scheduler, and runner on a device; `wrong` compares what the language model would get.

    Attributes:
        before_gather: called in each step between the connector's orders and what the runner launches.
        loaded: encodings that came from the lane.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before_gather: Callable[[], None] = nothing
        self.loaded: list[str] = []
        self.embedded: list[Embedded] = []
        self.prompts: dict[str, list[int]] = {}

    def _replace_cuda(self, stack: ExitStack) -> None:
        """Leave everything in its place."""

    def _make_runner(self) -> Any:
        runner: Any = make_runner(ours=True, device=CUDA)
        self.reference: Any = Model()
        runner.model = Model().to(CUDA)
        arguments = (runner.model, MAX_TOKENS, HIDDEN, runner.encoder_cache, torch.float32, CUDA)
        runner.model_state = States(EncoderRunner(*arguments))
        return runner

    def add(self, request_id: str, prompt: int, items: Sequence[tuple[int, int]] = (), max_tokens: int = 4) -> None:
        super().add(request_id, prompt, items, max_tokens)
        self.prompts[request_id] = list(self.scheduler.requests[request_id].prompt_token_ids)

    def _embed(self, sent: Any) -> None:
        self.loaded += sent.ec_connector_metadata.load
        runner, requests = self.runner, list(sent.num_scheduled_tokens)
        rows_of_states = [runner.req_states.req_id_to_index[name] for name in requests]
        starts = runner.req_states.num_computed_tokens_np[rows_of_states]
        counts = np.array(list(sent.num_scheduled_tokens.values()))
        ids = runner.req_states.all_token_ids.gpu
        parts = [ids[row, at : at + n] for row, at, n in zip(rows_of_states, starts, counts, strict=True)]
        batch = SimpleNamespace(
            req_ids=requests,
            num_tokens=int(counts.sum()),
            num_tokens_after_padding=int(counts.sum()),
            num_scheduled_tokens=counts,
            query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
            prefill_len_np=runner.req_states.prefill_len.np[rows_of_states],
            num_computed_tokens_np=starts,
            input_ids=torch.cat(parts),
        )
        self.before_gather()
        before = set(runner.encoder_cache.encoder_outputs)
        inputs = runner.model_state.prepare_inputs_embeds(sent.scheduled_encoder_inputs, batch, runner.req_states)
        self.in_step += set(runner.encoder_cache.encoder_outputs) - before
        tokens, rows, mask = {}, [], []
        at = 0
        for name, start, count in zip(requests, starts.tolist(), counts.tolist(), strict=True):
            found, takes = gathered(self.items[name], self.expected, start, start + count)
            tokens[name] = at, self.prompts[name][start : start + count]
            rows += [row for item in found for row in item]
            mask += takes
            at += count
        shape = len(rows), HIDDEN
        self.embedded.append(
            Embedded(inputs.clone(), batch.input_ids, tokens, torch.tensor(rows).view(shape), torch.tensor(mask))
        )

    def wrong(self) -> list[int]:
        """Return the steps since the last call, by number, in which the language model got other numbers."""
        torch.cuda.synchronize()
        found = []
        for number, step in enumerate(self.embedded):
            ids = step.ids.cpu()
            with torch.inference_mode():
                expected = self.reference.embed_input_ids(ids, [step.rows], is_multimodal=step.mask)
            right = torch.equal(step.inputs.cpu(), expected)
            for at, tokens in step.tokens.values():
                right &= ids[at : at + len(tokens)].tolist() == tokens
            if not right:
                found.append(number)
        self.embedded.clear()
        return found
