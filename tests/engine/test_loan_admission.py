"""Whom vLLM's own scheduler admits beside a loan. Tokens and the lane's answers are made up; decisions are real."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.steered import Clock, request, scheduler_with
from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.testing import make_item, make_session_update, run_step

pytestmark = pytest.mark.skipif(not compat.ec_connectors_hold_back(), reason="this vLLM has no lane")

BLOCKS, BLOCK, RESERVE, PICTURE = 100, 16, 16, 64
LOAN = (PICTURE - RESERVE) // 8


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def scheduler(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a scheduler with 100 KV blocks, of which each holds 8 embeddings."""
    return lender(monkeypatch)


def lender(monkeypatch: pytest.MonkeyPatch, **config: Any) -> Any:
    monkeypatch.setattr("vllm_omni_sched.engine.lending.facts.sure_bytes", lambda layer_bytes: layer_bytes)
    options = {"encode_ahead": True, "kv_lending": 0.1, "itl_target_ms": 0.01, **config.pop("options", {})}
    expert = {"encoder_reserve_embeds": RESERVE, "encode_bytes_per_embed": 16}
    sizes: dict[str, Any] = {"num_blocks": BLOCKS + 1, "max_num_batched_tokens": 2048, "encoder_cache_size": 64}
    sizes |= {"encoder_budget": 64, "max_model_len": 1440}
    return scheduler_with({**options, "expert": expert}, **{**sizes, **config})


def step(scheduler: Any, clock: Clock) -> list[str]:
    """Run a step of 10 ms, and return the requests that it admits."""
    clock.now += 0.01
    scheduled = run_step(scheduler).scheduled
    assert "allocate_slots" not in vars(scheduler.kv_cache_manager), "vLLM's own is back"
    return [new.req_id for new in scheduled.scheduled_new_reqs]


def picture(id_: str, prompt: int = 80) -> Any:
    return request(id_, prompt, [make_item(8, PICTURE, f"picture of {id_}")])


def with_a_loan(scheduler: Any, clock: Clock, output: int = 1000) -> None:
    """Let a text run and a picture be encoded in lent blocks, for a second."""
    scheduler.add_request(request("text", 200, max_tokens=output))
    assert step(scheduler, clock) == ["text"]
    for _ in range(10):
        step(scheduler, clock)
    scheduler.omni.policies.core.costs.encoded("image", PICTURE, 1.0)
    scheduler.add_request(picture("first"))
    while not len(scheduler.omni.policies.lent):
        assert step(scheduler, clock) == []
    assert lending(scheduler).lent_blocks == LOAN


def lending(scheduler: Any) -> Any:
    return scheduler.omni.policies.core.lending


def free(scheduler: Any) -> int:
    count: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return count


def tokens_of(scheduler: Any, spare: int) -> int:
    """Return the tokens of a prompt that leaves so many blocks beside the loan."""
    return (free(scheduler) - spare) * BLOCK


def test_a_request_that_goes_to_the_lane_leaves_its_place_to_none_that_is_longer(scheduler: Any, clock: Clock):
    with_a_loan(scheduler, clock)
    long = tokens_of(scheduler, spare=8)
    scheduler.add_request(picture("second"))
    scheduler.add_request(request("long", long))
    scheduler.add_request(request("short", 16))
    assert step(scheduler, clock) == [], "two encodes of a second are 400 steps: it would need blocks before their end"
    assert scheduler.omni.policies.planner.decisions.ledger.waits("second")


def test_nobody_is_preempted_who_would_not_be_without_the_loan(scheduler: Any, clock: Clock):
    with_a_loan(scheduler, clock, output=300)
    preempted: list[str] = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda one, *args, **kwargs: (
        preempted.append(one.request_id),
        preempt(one, *args, **kwargs),
    )
    scheduler.add_request(picture("second"))
    scheduler.add_request(request("long", tokens_of(scheduler, spare=3), max_tokens=60))
    ahead = scheduler.omni.policies.core.ahead
    for ticket, id_ in ((1, "first"), (2, "second")):
        for _ in range(100):
            step(scheduler, clock)
        ahead.encoded(f"picture of {id_}", ticket, 1.0, clock.now)
    for _ in range(300):
        step(scheduler, clock)
    assert preempted == []
    assert not scheduler.requests


def test_a_session_is_refused_alone(scheduler: Any, clock: Clock):
    from vllm.v1.engine import FinishReason

    session = make_session_update("session", 80, [make_item(0, PICTURE, "picture of a session")], max_tokens=4)
    scheduler.add_request(request("text", 200, max_tokens=1000))
    step(scheduler, clock)
    scheduler.add_request(session)
    clock.now += 0.01
    (error,) = [one for one in run_step(scheduler).outputs[0].outputs if one.request_id == "session"]
    assert error.finish_reason is FinishReason.ERROR
    assert list(scheduler.requests) == ["text"]


def test_an_engine_whose_longest_request_does_not_fit_beside_the_largest_loan_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    """The item of such a request might wait for a loan that the request's own blocks leave no room for."""
    lender(monkeypatch, max_model_len=90 * BLOCK)
    with pytest.raises(ConfigError, match="lends up to 10 of 100 KV blocks, and the longest request needs 91"):
        lender(monkeypatch, max_model_len=90 * BLOCK + 1)
