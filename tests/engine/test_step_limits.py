"""The limits of a step, on the real scheduler: requests and prompt tokens. Tokens are made up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.steered import EMBEDS, Clock, first_steps, request, scheduler_with
from vllm_omni_sched.testing import make_item, run_step


def test_the_batch_limit_holds_back_newcomers_and_preempts_nobody():
    scheduler = scheduler_with({"batch_control": "pid", "batch_max": 4}, max_num_seqs=16)
    for i in range(8):
        scheduler.add_request(request(f"r{i}", max_tokens=50))
    assert first_steps(scheduler, 1) == [["r0"]]  # starts at the minimum
    scheduler.omni.policies.core.limits.batch.limit = 3
    assert first_steps(scheduler, 1) == [["r1", "r2"]]
    scheduler.omni.policies.core.limits.batch.limit = 1
    assert first_steps(scheduler, 1) == [[]]
    assert len(scheduler.running) == 3
    assert scheduler.max_num_running_reqs == 16  # vLLM's own number is back


def test_prompts_leave_room_for_those_who_decode():
    scheduler = scheduler_with({"prefill_control": "adaptive", "prefill_min_tokens": 10}, max_num_batched_tokens=64)
    scheduler.add_request(request("long", 60, max_tokens=2))
    assert run_step(scheduler).scheduled.num_scheduled_tokens == {"long": 60}  # nobody decodes: all of it
    scheduler.add_request(request("next", 60))
    assert run_step(scheduler).scheduled.num_scheduled_tokens == {"long": 1, "next": 10}
    assert scheduler.max_num_scheduled_tokens == 64


def test_a_piece_of_a_prompt_that_fills_its_limit_is_told_as_full():
    scheduler = scheduler_with({"prefill_control": "adaptive", "prefill_min_tokens": 10}, max_num_batched_tokens=64)
    scheduler.add_request(request("decodes", 20, max_tokens=30))
    run_step(scheduler)
    scheduler.add_request(request("long", 60))
    told = []
    observe = scheduler.omni.policies.core.limits.prefill.observe
    scheduler.omni.policies.core.limits.prefill.observe = lambda seconds, now, size: (
        told.append(size),
        observe(seconds, now, size),
    )
    run_step(scheduler)
    assert told == [10]
    assert scheduler.omni.policies.core.limits.prefill.reason.value != "not_filled"


def test_long_prompts_share_a_step_instead_of_queueing_behind_each_other():
    prompts = {"huge": 600, "large": 300, "small": 20}
    steps = {}
    for pieces in (False, True):
        scheduler = scheduler_with({"pieces": pieces}, max_num_batched_tokens=256)
        for id_, length in prompts.items():
            scheduler.add_request(request(id_, length))
        steps[pieces] = run_step(scheduler).scheduled.num_scheduled_tokens
    assert steps[False] == {"huge": 256}
    assert steps[True] == {"huge": 118, "large": 118, "small": 20}


def test_the_time_of_an_encode_is_learnt_from_its_step(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    scheduler = scheduler_with({"encode_rounds": True}, max_num_batched_tokens=512, encoder_cache_size=512)
    schedule = scheduler.schedule

    def slow() -> Any:
        output = schedule()
        clock.now += 0.4
        return output

    monkeypatch.setattr(scheduler, "schedule", slow)
    scheduler.add_request(request("r", 80, [make_item(4, EMBEDS, "a")]))
    run_step(scheduler)
    assert scheduler.omni.policies.core.costs.encode_seconds("image", EMBEDS) == pytest.approx(0.4)
