"""The rules of `MemoryLending`, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.engine.lending import (
    EncodeDemand,
    LendingEngine,
    LendingPlan,
    LendingReason,
    LendingSnapshot,
    MemoryLending,
    refuse_lending,
)


def policy(most: float = 0.5) -> MemoryLending:
    return MemoryLending(most, hold_seconds=1.0, patience_seconds=2.0)


def snapshot(*loans: int | tuple[int, int], free: int = 100, **more: Any) -> LendingSnapshot:
    demands = tuple(EncodeDemand(one) if isinstance(one, int) else EncodeDemand(*one) for one in loans)
    return LendingSnapshot(100, free, demands=demands, **more)


def test_what_fits_into_the_memory_set_aside_needs_no_loan():
    assert policy().plan(snapshot(0, 0), 0.0) == LendingPlan(0, LendingReason.NOT_NEEDED, 2)


def test_the_loan_is_for_as_many_waiting_encodes_as_fit():
    assert policy().plan(snapshot(10, 30, 60), 0.0) == LendingPlan(30, LendingReason.LENT, 2)


def test_encodes_that_need_no_loan_run_together_in_one_while_no_request_waits():
    assert policy().plan(snapshot(0, 20, 40), 0.0) == LendingPlan(40, LendingReason.LENT, 3)
    assert policy().plan(snapshot(0, 20, blocked=True), 9.0) == LendingPlan(0, LendingReason.NOT_NEEDED, 1)
    assert policy().plan(snapshot(0, 20, free=10), 9.0) == LendingPlan(0, LendingReason.NOT_NEEDED, 1)


def test_what_running_requests_will_need_is_not_lent():
    lender = policy()
    assert lender.plan(snapshot(30, free=40, needed_blocks=10), 0.0).blocks == 30
    assert lender.plan(snapshot(31, free=40, needed_blocks=10), 0.0) == LendingPlan(0, LendingReason.NEEDED_BY_REQUESTS)


def test_the_requests_of_the_encodes_keep_room_for_themselves():
    assert policy().plan(snapshot((10, 20), (20, 60), free=60), 0.0).blocks == 10


def test_more_than_the_bound_is_refused():
    assert policy(0.2).plan(snapshot(21), 0.0) == LendingPlan(0, LendingReason.TOO_LARGE)


def test_a_request_that_waits_for_blocks_goes_first_but_not_for_ever():
    lender, waits = policy(), snapshot(10, blocked=True)
    assert lender.plan(waits, 0.0) == LendingPlan(0, LendingReason.REQUESTS_FIRST)
    assert lender.plan(waits, 1.9).reason is LendingReason.REQUESTS_FIRST
    assert lender.plan(waits, 2.0) == LendingPlan(10, LendingReason.LENT, 1)
    made = snapshot(10, free=90, lent_blocks=10, blocked=True)
    assert lender.plan(made, 2.1).blocks == 10, "it stays until the encode has begun"
    lender.plan(snapshot(free=90, lent_blocks=10, used_blocks=10, blocked=True), 2.2)
    next_one = snapshot(10, free=90, lent_blocks=10, blocked=True)
    assert lender.plan(next_one, 3.0) == LendingPlan(0, LendingReason.REQUESTS_FIRST)


def test_an_encode_that_has_waited_for_long_saves_blocks_while_no_request_is_admitted():
    lender = policy()
    assert lender.plan(snapshot(40, free=20, needed_blocks=5), 0.0).admits
    assert lender.plan(snapshot(40, free=20, needed_blocks=5), 2.0) == LendingPlan(
        15, LendingReason.SAVING, admits=False
    )
    more = snapshot(40, free=20, lent_blocks=15, needed_blocks=5)
    assert lender.plan(more, 3.0) == LendingPlan(30, LendingReason.SAVING, admits=False)
    assert lender.plan(snapshot(40, free=20, lent_blocks=30, needed_blocks=5), 4.0) == LendingPlan(
        40, LendingReason.LENT, 1
    )


def test_nothing_is_saved_while_nothing_runs_that_could_end():
    lender, held = policy(), snapshot(40, free=20)
    assert [lender.plan(held, now).admits for now in (0.0, 2.0, 9.0)] == [True, True, True]
    assert not lender.plan(snapshot(40, free=20, needed_blocks=1), 9.1).admits


def test_an_idle_loan_is_not_for_encodes_without_room():
    lender, tight = policy(), snapshot(0, 8, free=3, lent_blocks=10, needed_blocks=6)
    assert lender.plan(tight, 0.0) == LendingPlan(7, LendingReason.RECALLED, 1)


def test_an_idle_loan_is_recalled_when_requests_need_it():
    idle = snapshot(free=3, lent_blocks=10, needed_blocks=5)
    assert policy().plan(idle, 0.0) == LendingPlan(8, LendingReason.RECALLED)
    assert policy().plan(snapshot(free=90, lent_blocks=10, blocked=True), 0.0) == LendingPlan(0, LendingReason.RECALLED)


def test_what_is_used_is_not_taken_back():
    used = snapshot(free=0, lent_blocks=10, used_blocks=6, needed_blocks=50, blocked=True)
    assert policy().plan(used, 0.0).blocks == 6
    waits = snapshot(20, free=0, lent_blocks=10, used_blocks=6, needed_blocks=50)
    assert policy().plan(waits, 0.0) == LendingPlan(6, LendingReason.NEEDED_BY_REQUESTS)


LENDS = LendingEngine("cpu", encode_ahead=True, bytes_per_embed=1000.0)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"device": "cuda"}, "the device 'cuda': vLLM makes the KV cache in one allocation"),
        ({"encode_ahead": False}, "only the lane of encode-ahead borrows blocks; set 'encode_ahead' to true"),
        ({"bytes_per_embed": 0.0}, "set 'expert.encode_bytes_per_embed'"),
        ({"workers": 2}, "each of 2 workers would have to give back"),
        ({"stages": 2}, "of several pipeline stages or context-parallel groups, only the first has the encoder"),
        ({"runner_v2": True}, "set VLLM_USE_V2_MODEL_RUNNER to 0"),
        ({"kv_connector": "NixlConnector"}, "the KV connector 'NixlConnector' may have registered the memory"),
        ({"takes_embeddings": True}, "leave out --enable-mm-embeds"),
        ({"shared_items": True}, "--mm-processor-cache-type lru"),
        ({"kv_groups": 2}, "the layers of this model are in 2 groups"),
        ({"block_bytes": 0}, "raise --block-size"),
    ],
)
def test_an_engine_that_cannot_lend_refuses(facts: dict[str, Any], why: str):
    refuse_lending(0.1, LENDS)
    refuse_lending(0.0, LENDS._replace(**facts))
    with pytest.raises(ConfigError, match="option 'kv_lending' cannot be on in this engine, because ") as raised:
        refuse_lending(0.1, LENDS._replace(**facts))
    assert why in str(raised.value)
