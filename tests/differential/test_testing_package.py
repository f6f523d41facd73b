"""`vllm_omni_sched.testing` does what its documentation shows."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_omni_sched import OmniScheduler, OmniSyncScheduler
from vllm_omni_sched.testing import (
    END_TOKEN,
    Step,
    drain,
    make_item,
    make_request,
    make_scheduler,
    make_session_update,
    run_step,
)


def tokens_of(steps: list[Step]) -> list[int]:
    return [
        token
        for step in steps
        for by_client in (step.outputs or {}).values()
        for output in by_client.outputs
        for token in output.new_token_ids
    ]


@pytest.mark.parametrize(
    ("cls", "async_scheduling", "built"),
    [
        (None, True, AsyncScheduler),
        (None, False, Scheduler),
        (OmniScheduler, True, OmniScheduler),
        (OmniScheduler, False, OmniSyncScheduler),
    ],
)
def test_the_class_that_fits(cls: type[Scheduler] | None, async_scheduling: bool, built: type) -> None:
    assert type(make_scheduler(cls, async_scheduling=async_scheduling)) is built


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_first_example(async_scheduling: bool) -> None:
    scheduler = make_scheduler(async_scheduling=async_scheduling, max_num_batched_tokens=64, encoder_cache_size=32)
    scheduler.add_request(make_request("a", 40, [make_item(4, 16, "cat"), make_item(20, 16, "dog")], max_tokens=5))
    step = run_step(scheduler)
    assert step.scheduled.num_scheduled_tokens == {"a": 40}
    assert step.scheduled.scheduled_encoder_inputs == {"a": [0, 1]}
    assert (step.outputs is None) == async_scheduling
    rest = drain(scheduler)
    assert len(tokens_of([step, *rest])) == 5
    assert not scheduler.requests


def test_session_example() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("s", 4, [make_item(0, 4, "frame-0")], resumable=True, max_tokens=1))
    scheduler.add_request(make_session_update("s", 4, [make_item(0, 4, "frame-1")], max_tokens=1))
    steps = drain(scheduler)
    assert [step.scheduled.scheduled_encoder_inputs for step in steps if step.scheduled.num_scheduled_tokens] == [
        {"s": [0]},
        {"s": [1]},
    ]
    scheduler.add_request(make_session_update("s", last=True))
    assert not scheduler.requests


def test_same_tokens_async_and_sync() -> None:
    sampled = []
    for async_scheduling in (False, True):
        scheduler = make_scheduler(async_scheduling=async_scheduling, max_num_batched_tokens=8)
        scheduler.add_request(make_request("a", 20, max_tokens=6))
        sampled.append(tokens_of(drain(scheduler)))
    assert sampled[0] == sampled[1]
    assert len(sampled[0]) == 6


def test_what_is_sampled_can_be_said() -> None:
    scheduler = make_scheduler(async_scheduling=False)
    scheduler.add_request(make_request("a", 3, max_tokens=9))
    outputs: Any = [run_step(scheduler, {"a": 7}), run_step(scheduler, {"a": END_TOKEN})]
    assert tokens_of(outputs) == [7, END_TOKEN]
    assert not scheduler.requests


def test_limits_reach_the_scheduler() -> None:
    scheduler = make_scheduler(encoder_budget=6, encoder_cache_size=9, max_item_embeds=4, num_blocks=7, block_size=4)
    assert scheduler.max_num_encoder_input_tokens == 6
    assert scheduler.encoder_cache_manager.cache_size == 9
    assert scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 7
    text_only = make_scheduler(multimodal=False)
    assert text_only.max_num_encoder_input_tokens == 0


def test_mistakes_in_a_test_are_named() -> None:
    with pytest.raises(ValueError, match="lies outside a prompt of 8 tokens"):
        make_request("a", 8, [make_item(4, 5, "cat")])
    with pytest.raises(ValueError, match="2 entries for 3"):
        make_item(0, 3, "cat", is_embed=[True, False])
    with pytest.raises(ValueError, match="announced"):
        make_request("a", 8, prompt_token_ids=[1])
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    scheduler.add_request(make_request("a", 40))
    with pytest.raises(RuntimeError, match="still 1 requests after 5 steps"):
        drain(scheduler, max_steps=5)
