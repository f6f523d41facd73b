"""Model runner V2 with our mixins, on V2's own classes.

What runs here is vLLM's: `EncoderRunner.gather_mm_embeddings`; `GPUModelRunner.add_requests`, `update_requests`,
`finish_requests`; `RequestState`, `BlockTables` and `EncoderCache`, fed with what a real scheduler sends, pickled as
for another process.

What cannot run without Triton and a GPU: the kernels. `StagedWriteTensor.apply_write` copies what was staged with numpy
instead, rows of a session's former life included; model, sampler, LoRA and `ModelState` are stand-ins, so attention and
sampling on top of these states are not covered here.
"""

from __future__ import annotations

import pickle
from collections import Counter
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.engine.harness.gather import gathered, items_of, outputs_of, windows
from tests.engine.harness.runner_v2 import BLOCK_SIZE, CPU, MAX_TOKENS, make_runner, take, without_gpu
from tests.support.arrangements import ARRANGEMENTS
from vllm_omni_sched import OmniScheduler
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.runners.extension import mix_in
from vllm_omni_sched.engine.runners.v2 import EncoderRunnerMixin
from vllm_omni_sched.engine.sessions.messages import SessionDelta
from vllm_omni_sched.testing import make_item, make_request, make_scheduler, make_session_update, run_step


def make_encoder_runner(items_by_request, *, ours: bool = True) -> EncoderRunner:
    cache = EncoderCache()
    for id_, items in items_by_request.items():
        cache.add_request(id_, items)
        cache.encoder_outputs.update(outputs_of(items))
    runner = EncoderRunner(torch.nn.Module(), 1, 1, cache, torch.float32, CPU)
    if ours:
        assert mix_in(runner, EncoderRunnerMixin, OmniSchedConfig())
    return runner


def gather(runner: EncoderRunner, steps: dict[str, tuple[int, int]], draft_lookahead: int = 0):
    """`gather_mm_embeddings` for requests at these `[start, end)`, as lists."""
    starts = np.array([start for start, _ in steps.values()])
    counts = np.array([end - start for start, end in steps.values()])
    embeddings, mask = runner.gather_mm_embeddings(
        list(steps),
        int(counts.sum()),
        counts,
        np.concatenate([[0], np.cumsum(counts)]),
        np.full(len(steps), 10_000),
        starts - draft_lookahead,
        **({"draft_lookahead": draft_lookahead} if draft_lookahead else {}),
    )
    return [rows.tolist() for rows in embeddings], mask.tolist()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("seed", range(5))
def test_gather_finds_what_the_slow_way_finds(arrangement, seed):
    rng = Random(seed)
    items = {"a": items_of(arrangement, rng, "a"), "b": items_of(arrangement, rng, "b")}
    runner = make_encoder_runner(items)
    outputs = runner.encoder_cache.encoder_outputs
    for a, b in zip(windows(rng, 40), windows(rng, 40), strict=True):
        expected = [gathered(items[id_], outputs, *step) for id_, step in (("a", a), ("b", b))]
        both = (expected[0][0] + expected[1][0], expected[0][1] + expected[1][1])
        assert gather(runner, {"a": a, "b": b}) == both
        assert gather(runner, {"a": a, "b": b}, draft_lookahead=1) == both
    assert runner.encoder_cache.mm_features == items


@pytest.mark.parametrize("arrangement", ["nested", "unsorted", "unsorted and nested"])
def test_stock_does_not(arrangement):
    """Our override can go once stock gathers them rightly."""
    wrong = 0
    for seed in range(5):
        rng = Random(seed)
        items = items_of(arrangement, rng)
        runner = make_encoder_runner({"a": items}, ours=False)
        for step in windows(rng, 40):
            try:
                wrong += gather(runner, {"a": step}) != gathered(items, runner.encoder_cache.encoder_outputs, *step)
            except AssertionError:  # its own: an item of its window is not in the step
                wrong += 1
    assert wrong > 0


def test_the_encoder_runner_keeps_its_lists_when_a_gather_fails():
    items = items_of("nested", Random(0))
    runner = make_encoder_runner({"a": items})
    runner.encoder_cache.encoder_outputs.clear()
    held = runner.encoder_cache.mm_features["a"]
    with pytest.raises(RuntimeError, match="Encoder cache miss"):
        gather(runner, {"a": (0, 200)})
    assert runner.encoder_cache.mm_features["a"] is held
    assert list(held) == list(items)


def known_of(runner: GPUModelRunner) -> dict[str, Any]:
    """Everything that the runner knows of each of its requests."""
    states, known = runner.req_states, {}
    for id_, index in states.req_id_to_index.items():
        prefill_len = int(states.prefill_len.np[index])
        num_blocks = int(runner.block_tables.num_blocks.np[0, index])
        known[id_] = {
            "prompt_len": int(states.prompt_len.np[index]),
            "tokens": states.all_token_ids.gpu[index, :prefill_len].tolist(),
            "model_state": runner.model_state.tokens[index],
            "num_computed_tokens": int(states.num_computed_tokens_np[index]),
            "max_seq_len": int(states.max_seq_len[index]),
            "blocks": runner.block_tables.block_tables[0].gpu[index, :num_blocks].tolist(),
            "items": [
                (item.identifier, item.mm_position.offset, item.mm_position.length, item.data is None)
                for item in runner.encoder_cache.mm_features[id_]
            ],
        }
    return known


@pytest.fixture
def no_gpu():
    with without_gpu():
        yield


def drive(
    seed: int, *, ours: bool, num_blocks: int, device: torch.device = CPU
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Sessions and plain requests through a scheduler and a runner. Returns what the runner knew after each step, and
    how many entries of each type it was sent, and preemptions."""
    rng = Random(seed)
    scheduler = make_scheduler(
        OmniScheduler if ours else None,
        use_v2_model_runner=True,
        async_scheduling=rng.random() < 0.5,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_TOKENS,
        encoder_cache_size=64,
        enable_prefix_caching=rng.random() < 0.5,
        options={"metrics": False} if ours else None,
    )
    runner = make_runner(ours=ours, device=device)
    history, sent = [], Counter()
    for step in range(120):
        for request in arrivals(step, rng):
            scheduler.add_request(request)
        with mock.patch.object(scheduler, "schedule", pickled := _Pickled(scheduler.schedule)):
            run_step(scheduler)
        scheduled = pickled.read()
        sent["preempted"] += len(scheduled.preempted_req_ids or ())
        sent.update(type(new).__name__ for new in scheduled.scheduled_new_reqs)
        take(runner, scheduled)
        history.append(known_of(runner))
    return history, sent


class _Pickled:
    """`schedule()`, and what it returned as another process reads it: before the step's outputs are taken in."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._bytes = b""

    def __call__(self) -> Any:
        output = self._schedule()
        self._bytes = pickle.dumps(output)
        return output

    def read(self) -> Any:
        return pickle.loads(self._bytes)


def arrivals(step: int, rng: Random) -> list[Any]:
    """Three sessions that grow by a chunk every few steps and end, and a request of another kind now and then."""
    arriving = []
    for number in range(3):
        id_, length = f"session-{number}", rng.randint(3, 30)
        item_length = rng.randint(1, length - 2)
        item = make_item(rng.randrange(3), item_length, f"{id_}-{step % 7}-of-{item_length}")
        if step == number:
            arriving.append(make_request(id_, length, [item], resumable=True, max_tokens=3))
        elif number < step < 90 and step % (3 + number) == 0:
            arriving.append(make_session_update(id_, length, [item] * (rng.random() < 0.8), max_tokens=3))
        elif step == 90 + number:
            arriving.append(make_session_update(id_, last=True))
    if step % 15 == 5:
        arriving.append(make_request(f"request-{step}", 40, [make_item(4, 16, "picture")], max_tokens=40))
    return arriving


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("num_blocks", [1000, 32], ids=["ample", "scarce"])
@pytest.mark.parametrize("seed", range(6))
def test_the_runner_knows_what_it_would_know(seed, num_blocks):
    expected, _ = drive(seed, ours=False, num_blocks=num_blocks)
    known, sent = drive(seed, ours=True, num_blocks=num_blocks)
    for step, (one, other) in enumerate(zip(expected, known, strict=True)):
        assert other == one, f"step {step}"
    assert sent[SessionDelta.__name__] >= 15
    assert (sent["preempted"] > 0) == (num_blocks == 32)
    assert any(len(requests) >= 3 for requests in known)


@pytest.mark.usefixtures("no_gpu")
def test_ended_requests_leave_nothing_behind():
    scheduler = make_scheduler(
        OmniScheduler, use_v2_model_runner=True, block_size=BLOCK_SIZE, options={"metrics": False}
    )
    runner = make_runner(ours=True)
    scheduler.add_request(make_request("s", 4, [make_item(0, 4, "a")], resumable=True, max_tokens=1))
    for last in (False, True):
        for _ in range(3):
            take(runner, run_step(scheduler).scheduled)
        scheduler.add_request(make_session_update("s", 4, [make_item(0, 4, "b")], last=last, max_tokens=1))
    for _ in range(3):
        take(runner, run_step(scheduler).scheduled)
    assert known_of(runner) == {}
    assert len(runner.omni.receiver) == 0
    assert runner.encoder_cache.mm_features == {}
