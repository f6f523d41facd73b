"""Encode-ahead from end to end on model runner V2: the real scheduler, both halves of the connector, a `StreamLane`.

vLLM's own here: the V2 runner's `execute_model` for steps without tokens, what it does with a step before it runs the
model, `EncoderCache`, `EncoderRunner`, and the `ActiveECConnector` with the worker's global connector. Stand-ins: CUDA
(`HostDevice`), the kernels of the runner's states, the language model.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.v1.worker.gpu.ec_connector import get_ec_connector
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.engine.harness.gather import gathered
from tests.engine.harness.runner_v2 import BLOCK_SIZE, CPU, make_runner, take, without_gpu
from tests.support.stream_device import HostDevice, OutOfMemory
from vllm_omni_sched import OmniScheduler, OmniSyncScheduler
from vllm_omni_sched.engine.ahead import encode as ahead_encode
from vllm_omni_sched.engine.runners.v2 import RunnerV2Mixin
from vllm_omni_sched.testing import make_item, make_request, make_runner_output, make_scheduler
from vllm_omni_sched.testing.steps import sample_by_position

EMBEDS, HIDDEN = 8, 4
POISON, HUGE = 1001, 1002  # items that cannot be encoded


class Model(torch.nn.Module):
    """Model with an encoder of three layers, and a language model that is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = torch.nn.Linear(1, 1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def get_language_model(self) -> torch.nn.Module:
        return self.language_model

    def embed_multimodal(self, values: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        rows = torch.arange(EMBEDS * HIDDEN, dtype=torch.float32).view(1, EMBEDS, HIDDEN)
        hidden = rows + values.float().view(-1, 1, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        if POISON in values:
            raise ValueError("not a picture")
        if HUGE in values:
            raise OutOfMemory("tried to allocate 2 GiB")
        return list(hidden)


class Engine:
    """Scheduler and runner; `step` does what the engine core and its worker do. A context manager."""

    def __init__(self, *, async_scheduling: bool = False, options: dict[str, Any] | None = None, **config: Any) -> None:
        self.device = HostDevice()
        ahead = {} if "profile" in (options or {}) else {"encode_ahead": True}  # the profile decides
        self.scheduler: Any = make_scheduler(
            OmniScheduler if async_scheduling else OmniSyncScheduler,
            async_scheduling=async_scheduling,
            use_v2_model_runner=True,
            max_item_embeds=EMBEDS,
            block_size=BLOCK_SIZE,
            options={"metrics": False, **ahead, **(options or {})},
            **{"max_num_batched_tokens": 64, "max_num_seqs": 8, "encoder_cache_size": 64, **config},
        )
        self.depth = 1 if async_scheduling else 0
        self.in_flight: list[tuple[Any, Any]] = []
        self.left: dict[str, list[str]] = {}
        self.items: dict[str, list[Any]] = {}
        self.expected: dict[str, torch.Tensor] = {}
        self.tokens: list[int] = []  # of each step
        self.in_step: list[str] = []  # encoded there

    def __enter__(self) -> Engine:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(GPUModelRunner, "load_model"))
            self._replace_cuda(stack)
            ec_transfer_state.ensure_ec_transfer_initialized(self.scheduler.vllm_config)
            stack.callback(ec_transfer_state.ensure_ec_transfer_shutdown)
            self.connector = ec_transfer_state.get_ec_transfer()
            self.worker = self.connector.worker
            self.runner: Any = self._make_runner()
            assert isinstance(self.runner, RunnerV2Mixin)
            self.runner.vllm_config = self.scheduler.vllm_config
            self.runner.device = torch.device("cuda")
            self.runner.kv_connector = NO_OP_KV_CONNECTOR
            self.runner.aux_output_connector = None
            self.runner.ec_connector = get_ec_connector(self.runner.vllm_config, self.runner.encoder_cache)
            self.runner.load_model()
            self._stack = stack.pop_all()
        return self

    def _replace_cuda(self, stack: ExitStack) -> None:
        """Put the host where CUDA would be: the runner's kernels, the lane's device, and where inputs are moved to."""
        enter = stack.enter_context
        enter(without_gpu())
        enter(mock.patch.object(ahead_encode, "CudaDevice", return_value=self.device))
        enter(
            mock.patch.object(
                ahead_encode,
                "group_and_batch_mm_kwargs",
                lambda items, device, pin_memory: group_and_batch_mm_kwargs(items, device=CPU),
            )
        )

    def _make_runner(self) -> Any:
        """Return a runner with its model; ``reference`` is a model on the CPU that gives the same embeddings."""
        runner: Any = make_runner(ours=True)
        runner.model = self.reference = Model()
        self.encoder = EncoderRunner(runner.model, 1, 1, runner.encoder_cache, torch.float32, CPU)
        return runner

    def __exit__(self, *_: object) -> None:
        self.device.go_on()
        self._stack.close()

    def add(self, request_id: str, prompt: int, items: Sequence[tuple[int, int]] = (), max_tokens: int = 4) -> None:
        """``items`` are (offset, content)."""
        features = [make_item(offset, EMBEDS, f"item-{value}", data=value) for offset, value in items]
        self.items[request_id] = features
        for _, value in items:
            if value not in (POISON, HUGE):
                with torch.inference_mode():
                    pictures = torch.tensor([[value]])
                    self.expected[f"item-{value}"] = self.reference.embed_multimodal(pictures, pictures)[0]
        self.scheduler.add_request(make_request(request_id, prompt, features, max_tokens=max_tokens))

    def step(self) -> Any:
        """Run a step of the engine and return what the runner returned."""
        scheduled = self.scheduler.schedule()
        sent = pickle.loads(pickle.dumps(scheduled))
        self.tokens.append(sent.total_num_scheduled_tokens)
        output: Any = make_runner_output(self.scheduler, scheduled, sample_by_position)
        if sent.total_num_scheduled_tokens:
            take(self.runner, sent)
            with self.runner.ec_connector.maybe_get_output(sent) as report:
                self._embed(sent)
            output.ec_connector_output = report
        else:
            output = self.runner.execute_model(sent)
        self.in_flight.append((scheduled, output))
        while len(self.in_flight) > self.depth or (self.in_flight and not sent.total_num_scheduled_tokens):
            for outputs in self.scheduler.update_from_output(*self.in_flight.pop(0)).values():
                for out in outputs.outputs:
                    if out.finish_reason is not None:
                        self.left.setdefault(out.request_id, []).append(str(out.finish_reason))
        return output

    def _embed(self, sent: Any) -> None:
        """Do what the runner does to get the inputs of the language model."""
        self._encode(sent)
        self._gather(sent)

    def _encode(self, sent: Any) -> None:
        hashes, kwargs = self.encoder.prepare_mm_inputs(sent.scheduled_encoder_inputs)
        self.in_step += hashes
        outputs = self.encoder.execute_mm_encoder(kwargs)
        self.runner.encoder_cache.encoder_outputs.update(zip(hashes, outputs, strict=True))

    def _gather(self, sent: Any) -> None:
        """Check that each request of the step finds the embeddings of its items, and that they are right."""
        computed = {new.req_id: new.num_computed_tokens for new in sent.scheduled_new_reqs}
        cached = sent.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in sent.num_scheduled_tokens.items():
            start = computed[request_id]
            found, mask = self.encoder.gather_mm_embeddings(
                [request_id], count, np.array([count]), np.array([0, count]), np.array([10_000]), np.array([start])
            )
            rows, places = gathered(self.items[request_id], self.expected, start, start + count)
            assert mask.tolist() == places
            torch.testing.assert_close([row.tolist() for row in found], rows)

    def step_until_left(self, *request_ids: str) -> list[Any]:
        """Run steps until the requests have left; return what the runner returned in each."""
        outputs = []
        while not set(request_ids) <= set(self.left):
            outputs.append(self.step())
            assert len(outputs) < 1000, f"still there: {sorted(self.scheduler.requests)}"
        return outputs

    def run(self, rng: Random, requests: int, *, values: range) -> None:
        """Arrivals and steps until all have left."""
        added = 0
        for _ in range(3000):
            if added < requests and rng.random() < 0.4:
                items, offset = [], 0
                for _ in range(rng.randrange(4)):
                    offset += rng.randrange(30)
                    items.append((offset, rng.choice(values)))
                    offset += EMBEDS
                self.add(f"r{added}", offset + rng.randrange(1, 20), items, max_tokens=rng.randrange(1, 20))
                added += 1
            self.step()
            if added == requests and not self.scheduler.requests and not self.in_flight:
                return
        raise AssertionError(f"still there: {sorted(self.scheduler.requests)}")
