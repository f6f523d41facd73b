"""Who runs now, on the real scheduler: order, limits, promises. Tokens are made up; decisions are real."""

from __future__ import annotations

import random

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from tests.support.steered import EMBEDS, Clock, first_steps, request, scheduler_with
from vllm_omni_sched.testing import make_item, make_session_update, run_step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_session_is_realtime_and_comes_first(clock: Clock):
    scheduler = scheduler_with({"waiting_order": "sla"}, max_num_seqs=1)
    scheduler.add_request(request("text"))
    scheduler.add_request(make_session_update("session", 8, max_tokens=1))
    assert first_steps(scheduler, 1) == [["session"]]


def test_requests_that_share_an_item_run_next_to_each_other(clock: Clock):
    scheduler = scheduler_with({"waiting_order": "sla"}, max_num_seqs=2)
    for i, mm_hash in enumerate(("a", "b", "a")):
        clock.now += 0.01
        scheduler.add_request(request(f"r{i}", 20, [make_item(4, EMBEDS, mm_hash)]))
    assert first_steps(scheduler, 1) == [["r0", "r2"]]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"omni_class": "interactiv"}, "did you mean 'interactive'"),
        ({"omni_class": 3}, "omni_class is 3, which is not an SLA class"),
        ({"omni_ttft_ms": -1}, "omni_ttft_ms must be a number of milliseconds above 0"),
        ({"omni_itl_ms": "fast"}, "omni_itl_ms"),
        ({"omni_itl_ms": True}, "omni_itl_ms"),
        ({"omni_itl_ms": float("nan")}, "omni_itl_ms"),
    ],
)
def test_a_promise_that_makes_no_sense_is_refused_and_others_go_on(extra, message, caplog):
    scheduler = scheduler_with({"waiting_order": "sla", "slo_metrics": True})
    scheduler.add_request(request("bad", **extra))
    scheduler.add_request(request("good", max_tokens=1))
    step = run_step(scheduler)
    reasons = {out.request_id: str(out.finish_reason) for of in step.outputs.values() for out in of.outputs}
    assert reasons == {"bad": "error", "good": "length"}
    assert message in caplog.text
    assert not scheduler.requests
    assert len(scheduler.omni.policies.slo) == len(scheduler.omni.policies.core.book) == 0


def test_a_session_with_memory_is_not_stuck_behind_one_that_finds_none(clock: Clock):
    """Neither may wait for the other for ever: the request for blocks, the session for its turn."""
    scheduler = scheduler_with({"waiting_order": "sla"}, num_blocks=11, max_num_batched_tokens=256)  # 160 tokens
    scheduler.add_request(make_session_update("session", 96, max_tokens=1))
    run_step(scheduler)
    scheduler.add_request(request("first by its class", 96, omni_class="realtime", omni_ttft_ms=1))
    assert run_step(scheduler).scheduled.num_scheduled_tokens == {}
    scheduler.add_request(make_session_update("session", 16, max_tokens=1))
    assert run_step(scheduler).scheduled.num_scheduled_tokens == {"session": 16}
    scheduler.add_request(make_session_update("session", last=True))
    assert run_step(scheduler).scheduled.num_scheduled_tokens == {"first by its class": 96}


def test_goodput_counts_who_got_what_was_promised(clock: Clock):
    scheduler = scheduler_with({"slo_metrics": True})
    scheduler.add_request(request("quick", max_tokens=3))
    scheduler.add_request(request("late", max_tokens=3, omni_ttft_ms=10))
    scheduler.add_request(request("gone", max_tokens=50))
    for _ in range(3):
        clock.now += 0.05
        run_step(scheduler)
    scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    metrics = scheduler.omni.metrics
    assert (metrics.slo_met["interactive"], metrics.slo_missed["interactive"]) == (1, 1)
    assert sum(metrics.ttft_seconds["interactive"].counts) == 3
    assert sum(metrics.itl_seconds["interactive"].counts) == 6
    assert len(scheduler.omni.policies.slo) == 0


EVERYTHING = {
    "waiting_order": "sla",
    "max_wait_seconds": 0.05,
    "batch_control": "pid",
    "prefill_control": "adaptive",
    "control_interval_ms": 1,
    "prefill_min_tokens": 4,
    "pieces": True,
    "encode_rounds": True,
    "slo_metrics": True,
}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_steered_every_request_leaves_once(seed: int, async_scheduling: bool):
    """Random options, arrivals, aborts, few blocks."""
    chance = random.Random(seed)
    options = {name: value for name, value in EVERYTHING.items() if chance.random() < 0.7}
    if chance.random() < 0.3:
        options["prefill_control"] = "pid"
    scheduler = scheduler_with(
        options,
        async_scheduling=async_scheduling,
        num_blocks=chance.choice([12, 40, 400]),
        max_num_seqs=chance.choice([2, 16]),
        encoder_cache_size=chance.choice([EMBEDS, 24, 64]),
    )
    left: dict[str, int] = {}
    aborted: set[str] = set()
    added = 0
    for _ in range(3000):
        if added < 30 and chance.random() < 0.4:
            items, offset = [], 0
            for _ in range(chance.randrange(0, 4)):
                offset += chance.randrange(0, 20)
                modality = chance.choice(["image", "audio"])
                items.append(make_item(offset, EMBEDS, f"{modality}-{chance.randrange(9)}", modality=modality))
                offset += EMBEDS
            extra = {"omni_class": chance.choice(["realtime", "interactive", "batch"])}
            prompt = offset + chance.randrange(1, 30)
            scheduler.add_request(request(f"r{added}", prompt, items, max_tokens=chance.randrange(1, 20), **extra))
            added += 1
        if chance.random() < 0.03 and scheduler.requests:
            victim = chance.choice(sorted(scheduler.requests))
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
            aborted.add(victim)
        step = run_step(scheduler)
        for of in (step.outputs or {}).values():
            for out in of.outputs:
                if out.finish_reason is not None:
                    left[out.request_id] = left.get(out.request_id, 0) + 1
        if added == 30 and not scheduler.requests:
            break
    assert not scheduler.requests
    assert set(left) | aborted == {f"r{i}" for i in range(30)}
    assert set(left.values()) <= {1}
    assert not set(left) & aborted
    assert len(scheduler.omni.policies.core.book) == 0
    assert not scheduler.waiting


def test_without_a_deciding_option_nothing_of_it_is_there():
    scheduler = scheduler_with({})
    assert scheduler.omni.policies is None
    assert type(scheduler.waiting).__module__ == "vllm.v1.core.sched.request_queue"
    assert SamplingParams().extra_args is None


def test_each_answer_of_a_session_counts_for_goodput(clock: Clock):
    scheduler = scheduler_with({"slo_metrics": True})
    metrics, slo = scheduler.omni.metrics, scheduler.omni.policies.slo
    for wait in (0.04, 0.04, 3.0):
        scheduler.add_request(make_session_update("session", 8, max_tokens=2))
        for _ in range(2):
            clock.now += wait
            run_step(scheduler)
        clock.now += 60.0  # until the client speaks again
    assert (metrics.slo_met["realtime"], metrics.slo_missed["realtime"]) == (2, 1)
    assert metrics.ttft_seconds["realtime"].total == pytest.approx(0.04 + 0.04 + 3.0)
    assert sum(metrics.itl_seconds["realtime"].counts) == 3
    scheduler.add_request(make_session_update("session", last=True))
    assert (sum(metrics.slo_met.values()) + sum(metrics.slo_missed.values()), len(slo)) == (3, 0)
