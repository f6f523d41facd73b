"""Model runner V1's gather with our mixin, on the runner's real method: right for items in any arrangement."""

from __future__ import annotations

from inspect import signature
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.engine.harness.gather import gathered, items_of, outputs_of, windows
from tests.support.arrangements import ARRANGEMENTS
from vllm_omni_sched import compat
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.runners.extension import mix_in
from vllm_omni_sched.engine.runners.v1 import RunnerV1Mixin


def make_runner(items_by_request, *, ours: bool = True):
    """A runner that knows these requests and their encoder outputs, and has no model."""
    runner = object.__new__(GPUModelRunner)
    runner.uses_mrope = False
    runner.is_multimodal_pruning_enabled = False
    runner.requests = {
        id_: SimpleNamespace(mm_features=items, num_computed_tokens=0) for id_, items in items_by_request.items()
    }
    runner.input_batch = SimpleNamespace(req_ids=list(items_by_request))
    runner.encoder_cache = {}
    for items in items_by_request.values():
        runner.encoder_cache.update(outputs_of(items))
    if ours:
        assert mix_in(runner, RunnerV1Mixin, OmniSchedConfig())
    return runner


def gather(runner, steps: dict[str, tuple[int, int]]):
    """`_gather_mm_embeddings` for requests at these `[start, end)`, as lists."""
    for id_, (start, _) in steps.items():
        runner.requests[id_].num_computed_tokens = start
    counts = {id_: end - start for id_, (start, end) in steps.items()}
    output = SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()))
    embeddings, mask = runner._gather_mm_embeddings(output)
    return [rows.tolist() for rows in embeddings], mask.tolist()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("seed", range(5))
def test_gather_finds_what_the_slow_way_finds(arrangement, seed):
    rng = Random(seed)
    items = {"a": items_of(arrangement, rng, "a"), "b": items_of(arrangement, rng, "b")}
    runner = make_runner(items)
    for a, b in zip(windows(rng, 40), windows(rng, 40), strict=True):
        expected = [gathered(items[id_], runner.encoder_cache, *step) for id_, step in (("a", a), ("b", b))]
        assert gather(runner, {"a": a, "b": b}) == (expected[0][0] + expected[1][0], expected[0][1] + expected[1][1])


@pytest.mark.parametrize("arrangement", ["nested", "unsorted", "unsorted and nested"])
def test_stock_does_not(arrangement):
    """Our override can go once stock gathers them rightly."""
    wrong = 0
    for seed in range(5):
        rng = Random(seed)
        items = items_of(arrangement, rng)
        runner = make_runner({"a": items}, ours=False)
        for step in windows(rng, 40):
            try:
                wrong += gather(runner, {"a": step}) != gathered(items, runner.encoder_cache, *step)
            except AssertionError:  # its own: an item of its window is not in the step
                wrong += 1
    assert wrong > 0


def test_stock_cannot_rewind_the_generators_of_cpus():
    """Our `sample_tokens` can go once stock can; without it, a seed ends the engine if its prompt takes two steps."""
    runner = object.__new__(GPUModelRunner)
    runner.device = torch.device("cpu")
    runner.use_async_scheduling = False
    runner.input_batch = SimpleNamespace(num_reqs=2, generators={1: torch.Generator("cpu")})
    runner.discard_request_mask = SimpleNamespace(np=np.array([True, True, True]))
    assert compat.rewinds_by_offset()
    with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
        runner._bookkeeping_sync(None, None, None, None, 0)


def test_generators_of_prompts_that_go_on_are_not_used(monkeypatch):
    seen = []

    def sample_tokens(self, grammar_output):
        seen.append(dict(self.input_batch.generators))
        if grammar_output is not None:
            raise ValueError(grammar_output)
        return "output"

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", sample_tokens)
    runner = make_runner({})
    generators = {row: torch.Generator("cpu") for row in range(3)}
    runner.input_batch = SimpleNamespace(num_reqs=3, generators=dict(generators))
    runner.discard_request_mask = SimpleNamespace(np=np.array([True, False, True, True]))
    runner.device = torch.device("cpu")
    assert runner.sample_tokens(None) == "output"
    with pytest.raises(ValueError, match="fails"):
        runner.sample_tokens("fails")
    runner.device = torch.device("cuda")  # its generators can be rewound
    runner.sample_tokens(None)
    assert seen == [{1: generators[1]}, {1: generators[1]}, generators]
    assert runner.input_batch.generators == generators


def draws(discarded):
    """Return what two requests with seeds draw, step by step, by vLLM's own batch and sampler; the second one's may not
    count.
    """
    device, logits = torch.device("cpu"), torch.zeros(2, 512)
    kernel = {"kernel_block_sizes": [16]} if "kernel_block_sizes" in signature(InputBatch).parameters else {}
    how = {"max_num_reqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "vocab_size": 512}
    batch = InputBatch(device=device, block_sizes=[16], max_num_blocks_per_req=[4], **how, **kernel)
    for seed in (1, 2):
        params = SamplingParams(temperature=1, seed=seed)
        generator = torch.Generator("cpu").manual_seed(seed)
        batch.add_request(CachedRequestState(str(seed), [1, 2, 3], [], params, generator, ([0],), 0, []))
    batch.refresh_metadata()
    runner = make_runner({})
    runner.device, runner.input_batch, runner.logits = device, batch, logits
    drawn = []
    for one in discarded:
        runner.discard_request_mask = SimpleNamespace(np=np.array([False, one]))
        drawn.append(runner.sample_tokens(None))
    return drawn


def test_a_seed_draws_the_same_tokens_after_steps_that_are_discarded(monkeypatch):
    """The metadata for vLLM's sampler has the batch's own dictionary of generators."""

    def sample_tokens(self, _):
        sampled = Sampler()(self.logits.clone(), self.input_batch.sampling_metadata).sampled_token_ids
        return sampled.flatten().tolist()

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", sample_tokens)
    at_once, later = draws([False] * 4), draws([True, True, False, False])
    assert [second for _, second in later[2:]] == [second for _, second in at_once[:2]]
    assert [first for first, _ in later] == [first for first, _ in at_once]
    assert len({token for step in at_once for token in step}) > 4


def test_the_runner_keeps_its_lists():
    """They are narrowed for the time of a gather only, also when it fails."""
    items = items_of("nested", Random(0))
    runner = make_runner({"a": items})
    gather(runner, {"a": (5, 30)})
    assert runner.requests["a"].mm_features is items
    runner.encoder_cache.clear()
    with pytest.raises(RuntimeError, match="Encoder cache miss"):
        gather(runner, {"a": (0, 200)})
    assert runner.requests["a"].mm_features is items


def test_items_that_arrive_later_are_found():
    items = items_of("nested", Random(3))
    runner = make_runner({"a": items})
    known = items[:3]
    runner.requests["a"].mm_features = known
    for _ in range(len(items) - 3):
        assert gather(runner, {"a": (0, 200)}) == gathered(known, runner.encoder_cache, 0, 200)
        known.append(items[len(known)])
    assert gather(runner, {"a": (0, 200)}) == gathered(items, runner.encoder_cache, 0, 200)
