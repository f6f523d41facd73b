"""KV blocks lent to encodes in the simulated engine: 1,000 tokens of KV cache, of which each holds 1 embedding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.sim_engine import PlainCosts, Run
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.engine.lending import LendingReason
from vllm_omni_sched.sim.work import Item, Request

COSTS = PlainCosts(base=0.01, prefill=1e-5, embed=0.001)
LIMITS = {
    "kv_tokens": 1000,
    "max_num_batched_tokens": 4000,
    "encoder_budget_embeds": 400,
    "encoder_cache_embeds": 400,
    "reserve_embeds": 100,
    "embeds_per_token": 1.0,
}
LANE = {"encode_ahead": True}


def request(number: int, arrival: float, embeds: int = 0, text: int = 10, output: int = 20) -> Request:
    items = (Item("image", embeds, number),) if embeds else ()
    return Request(number, arrival, text, output, items)


def run(*requests: Request, limits: dict[str, Any] | None = None, costs: PlainCosts = COSTS, **options: Any) -> Run:
    made = Run(costs, {**LIMITS, **(limits or {})}, **{"kv_lending": 0.4, **options})
    watched = made.engine._watcher
    made.most = 0  # type: ignore[attr-defined]

    def step(name: str, start: float, seconds: float, **facts: float) -> None:
        lending, prompts = made.core.lending, made.engine.prompts
        if lending is not None:
            made.most = max(made.most, lending.lent_blocks)  # type: ignore[attr-defined]
            assert prompts.kv_tokens <= prompts.kv_room
        assert watched is not None
        watched(name, start, seconds, **facts)

    made.engine._watcher = step
    return made.serve(requests)


@pytest.mark.parametrize("options", [{}, LANE])
def test_an_item_larger_than_what_is_set_aside_is_encoded_in_lent_blocks(options: dict[str, Any]):
    found = run(request(0, 0.0), request(1, 0.1, embeds=300), **options)
    assert len(found.ended) == 2
    assert found.most == 200  # type: ignore[attr-defined]
    assert found.core.lending.reasons[LendingReason.LENT] > 0


@pytest.mark.parametrize("options", [{}, LANE])
def test_items_that_fit_need_no_loan(options: dict[str, Any]):
    found = run(*(request(i, 0.1 * i, embeds=100) for i in range(5)), **options)
    assert len(found.ended) == 5
    assert found.most == 0  # type: ignore[attr-defined]


def test_a_step_encodes_no_more_than_its_memory_holds():
    found = run(*(request(i, 0.0, embeds=90) for i in range(8)))
    # the first step has what is set aside and the bound of 400, the encoder's budget is 400
    assert max(facts["encode_seconds"] for _, _, facts in found.steps) == pytest.approx(0.36)
    assert len(found.ended) == 8


@pytest.mark.parametrize("options", [{}, LANE])
def test_requests_that_run_are_never_preempted_by_a_loan(options: dict[str, Any]):
    busy = [request(i, 0.0, text=60, output=40) for i in range(5)]
    found = run(*busy, request(9, 0.2, embeds=380), **options)
    assert len(found.ended) == 6
    assert found.engine.preempted == 0


@pytest.mark.parametrize("options", [{}, LANE])
def test_a_large_item_is_not_passed_for_ever(options: dict[str, Any]):
    """Text comes for 30 seconds and would keep the cache full; the large item of the first second is encoded long
    before."""
    text = [request(i, 0.02 * i, text=60, output=100) for i in range(1500)]
    found = run(*text, request(5000, 0.5, embeds=400), **options)
    assert len(found.ended) == 1501
    assert found.jobs[5000].first < 8.0


def test_everything_returns():
    found = run(request(0, 0.0, embeds=300, output=250), **LANE)
    lending = found.core.lending
    assert lending is not None
    assert lending.reasons[LendingReason.RETURNED] == 1
    assert lending.lent_blocks == 0


def test_prompts_that_run_have_room_to_decode_beside_a_loan():
    known = request(8, 0.0, embeds=90, output=9)  # from here on the times of an encode and of steps are known
    prompts = [request(i, 0.3, text=110, output=50) for i in range(6)]
    found = run(known, *prompts, request(9, 0.3, embeds=300, output=1), **LANE)
    assert len(found.ended) == 8
    assert found.engine.preempted == 0, "all 6 fit, and the loan would be made while none of them decodes yet"


def test_a_request_does_not_wait_for_as_long_as_encodes_follow_one_another():
    """A request that does not fit beside the loan starts, although the lane always has a next item for the loan."""
    slow = PlainCosts(base=0.05, embed=0.001)
    large = [request(i, 0.3 * i, embeds=400, output=1) for i in range(60)]
    runs, waits = request(100, 0.0, text=100, output=490), request(101, 8.0, text=450, output=5)
    found = run(*large, runs, waits, costs=slow, **LANE)
    assert len(found.ended) == 62
    assert found.jobs[101].first < 10.0


def test_a_loan_that_comes_while_no_prompt_is_planned_lets_the_encode_begin():
    busy = [request(i, 0.0, text=200, output=output) for i, output in enumerate((60, 200, 200))]
    known = request(8, 0.0, embeds=90, output=1)  # from here on the time of an encode is known
    found = run(*busy, known, request(9, 0.3, embeds=300), **LANE)
    assert len(found.ended) == 5
    assert found.core.lending.reasons[LendingReason.NEEDED_BY_REQUESTS] > 0
    assert found.jobs[9].first < 1.4, "it waits for the end of one request, and not of all"


def test_an_engine_that_dies_forgets_its_loan():
    made = run(request(0, 0.0, embeds=300, output=250))
    made.core.lending.lent_blocks = 5  # type: ignore[union-attr]
    made.engine.kill()
    assert made.core.lending.lent_blocks == 0  # type: ignore[union-attr]


def test_an_item_that_would_never_fit_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="needs 300 beside the 100 embeddings that are set aside"):
        run(kv_lending=0.2)


def test_a_request_that_does_not_fit_beside_the_largest_loan_is_refused():
    with pytest.raises(ConfigError, match="has 1000 of which 600 are never lent"):
        run(request(0, 0.0, text=590, output=20))


def test_without_the_option_nothing_is_lent():
    found = run(request(0, 0.0, embeds=300), kv_lending=0.0)
    assert found.core.lending is None
    assert len(found.ended) == 1


def measured(embed: float) -> Run:
    """Return an engine that knows how long its steps and its encodes take."""
    made = Run(PlainCosts(base=0.01, embed=embed), LIMITS, kv_lending=0.4)
    for step in range(-9, 1):
        made.core.steps.step(0.01 * step, 1, 0)
    made.core.costs.encoded("image", 100, 100 * embed)
    return made


@pytest.mark.parametrize(("text", "embeds"), [(190, 399), (589, 0)])
def test_requests_begin_beside_the_loan_for_their_items_where_nothing_runs(text: int, embeds: int) -> None:
    """Until both items are encoded, a decoding request would need more blocks than there are."""
    made = measured(embed=0.01)
    made.serve([request(0, 0.0, embeds, text=text, output=1), request(1, 0.0, 200, text=1, output=1)])
    assert len(made.ended) == 2


def test_a_request_that_was_refused_beside_a_loan_gets_its_own_where_nothing_runs() -> None:
    """The one that decodes and the one with the loan end in the same step: nobody waits for blocks any more."""
    made = measured(embed=0.001)
    decoding, lent = request(0, 0.0, output=2), request(1, 0.005, 300, text=1, output=1)
    made.serve([decoding, lent, request(2, 0.005, 212, text=188)])
    assert len(made.ended) == 3
