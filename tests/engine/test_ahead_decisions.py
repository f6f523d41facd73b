"""Encode-ahead on the real scheduler, with a worker that only keeps books: what it holds, and what it was sent."""

from __future__ import annotations

import random

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.harness.bench import EMBEDS, Bench
from vllm_omni_sched.monitor.counts import SchedulerMetrics


def test_alone_it_is_encoded_in_the_step():
    bench = Bench()
    bench.add("r", 20, [(4, "a")])
    assert bench.step().num_scheduled_tokens == {"r": 20}
    assert (bench.in_step, bench.submitted) == (["a"], [])


def test_beside_somebody_who_decodes_it_goes_to_the_lane_and_decoding_goes_on():
    bench = Bench()
    bench.decode()
    bench.add("r", 20, [(4, "a")])
    assert bench.step().num_scheduled_tokens == {"text": 1}
    assert bench.at_lane == ["a"]
    assert bench.step(finish=1).num_scheduled_tokens == {"text": 1}
    assert bench.step().num_scheduled_tokens == {"text": 1, "r": 20}
    assert (bench.in_step, bench.submitted) == ([], ["a"])
    assert bench.cache == {"a"}
    assert len(bench.planner.decisions.ledger) == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_is_measured_without_the_time_for_which_it_was_held_back(async_scheduling: bool):
    bench = Bench(async_scheduling=async_scheduling)
    bench.decode()
    bench.add("r", 20, [(4, "a")])
    measured: list[float] = []
    step_ended = bench.scheduler.omni.policies.core.step_ended

    def note(*args: object, rest_seconds: float, **kwargs: object) -> None:
        measured.append(rest_seconds)
        step_ended(*args, rest_seconds=rest_seconds, **kwargs)

    bench.scheduler.omni.policies.core.step_ended = note
    for rested in (0.03, 0.02, 0.0, 0.0):
        bench.rested = rested
        bench.step(finish=rested == 0.02)
    assert measured == ([0.0, 0.03, 0.02, 0.0] if async_scheduling else [0.03, 0.02, 0.0, 0.0])


def test_prefill_starts_in_front_of_a_missing_item_when_it_is_worth_a_step():
    bench = Bench(max_num_batched_tokens=256)
    bench.decode()
    bench.add("r", 200, [(4, "a"), (100, "b")])
    bench.step(finish=1)
    assert bench.at_lane == ["b"]
    assert bench.step().num_scheduled_tokens == {"text": 1, "r": 100}
    assert bench.step(finish=1).num_scheduled_tokens == {"text": 1}
    assert bench.step().num_scheduled_tokens == {"text": 1, "r": 100}


def test_an_item_that_cannot_be_encoded_fails_its_own_requests_only():
    bench = Bench()
    bench.decode()
    bench.poisoned = {"bad"}
    bench.add("r1", 20, [(4, "bad")])
    bench.add("r2", 40, [(4, "good"), (20, "bad")])
    bench.add("r3", 20, [(4, "good")])
    for _ in range(8):
        bench.step(finish=1)
    assert bench.left == {"r1": ["error"], "r2": ["error"], "r3": ["length"]}
    assert bench.submitted.count("bad") == 1
    assert list(bench.scheduler.requests) == ["text"]


def test_an_item_that_was_cached_and_is_evicted_before_its_request_runs_is_encoded_after_all():
    bench = Bench(encoder_cache_size=24)
    bench.decode()
    for i, mm_hash in enumerate(("x", "x2", "x3")):
        bench.add(f"before-{i}", 20, [(4, mm_hash)], max_tokens=1)
        for _ in range(4):
            bench.step(finish=1)
    bench.add("evicts", 20, [(4, "y")])
    bench.add("r1", 60, [(10, "b"), (30, "x"), (45, "c")])
    bench.add("r2", 60, [(10, "d"), (30, "e")])
    bench.step()
    for _ in range(30):
        bench.step(finish=3)
    assert [bench.left[id_] for id_ in ("evicts", "r1", "r2")] == [["length"]] * 3


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_every_request_leaves_once_and_no_item_is_missing(seed: int, async_scheduling: bool):
    """Arrivals, aborts, equal items, few blocks, a small encoder cache, a lane of changing speed."""
    chance = random.Random(seed)
    bench = Bench(
        async_scheduling=async_scheduling,
        encoder_cache_size=chance.choice([EMBEDS, 24, 64]),
        num_blocks=chance.choice([12, 40, 400]),
        max_num_batched_tokens=chance.choice([16, 64, 300]),
        enable_prefix_caching=chance.random() < 0.5,
        max_num_seqs=chance.choice([2, 16]),
    )
    bench.poisoned = {"item-3"} if chance.random() < 0.3 else set()
    bench.churn(chance, 25, lambda: chance.randrange(12))
    assert len(bench.planner.decisions.ledger) == 0
    bench.step()
    assert (bench.lane, bench.made) == ([], set())
    if not bench.poisoned:
        assert {reason for reasons in bench.left.values() for reason in reasons} <= {"length", "stop"}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_after_a_reset_what_is_ready_or_being_encoded_is_encoded_once_more(async_scheduling: bool):
    bench = Bench(async_scheduling=async_scheduling)
    bench.decode()
    bench.add("r", 60, [(4, "a"), (20, "b"), (40, "c")])
    bench.step()
    bench.step(finish=1)
    assert (bench.submitted, bench.made) == (["a", "b"], {"a"})
    bench.scheduler.reset_encoder_cache()
    bench.cache = set()
    assert not bench.planner.is_ready("a")
    for _ in range(9):
        bench.step(finish=1)  # the first of these may report what was encoded before
    assert bench.submitted == ["a", "b", "a", "b", "c"]
    assert bench.cache == {"a", "b", "c"}
    assert bench.in_step == []


def test_reports_of_before_a_reset_do_not_count():
    bench = Bench()
    bench.decode()
    bench.add("r", 20, [(4, "a")])
    bench.step()
    late = bench._encode(1)
    bench.scheduler.reset_encoder_cache()
    bench.planner.take_report(late)
    assert not bench.planner.is_ready("a")
    bench.step()
    assert bench.submitted == ["a", "a"]


def test_two_items_of_one_name_that_wait_at_the_same_time_have_each_its_own_encoding():
    """As in vLLM, the one that runs first decides what is under that name in the encoder cache."""
    bench = Bench()
    bench.decode()
    bench.add("r", 20, [(4, "x")])
    bench.step()
    bench.data["x"] = 7
    bench.add("s", 20, [(4, "x")])
    bench.step(finish=1)
    assert [data for _, data in bench.contents] == [0, 7]
    bench.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    bench.step(finish=1)
    assert bench.step().num_scheduled_tokens == {"text": 1, "s": 20}
    ((content, name),) = bench.loaded.items()
    assert (name, dict(bench.contents)[content]) == ("x", 7)
    metrics = SchedulerMetrics()
    bench.planner.count_into(metrics)
    assert metrics.kept_not_reused["other_content"] == 1
    while bench.scheduler.requests.keys() - {"text"}:
        bench.step()
    bench.add("t", 20, [(4, "y")])
    bench.step(finish=1)
    bench.step()
    assert not bench.planner.identifiers


def test_equal_items_of_one_name_are_encoded_once_though_each_request_has_its_own_copy():
    bench = Bench()
    bench.decode()
    for name in "rst":
        bench.add(name, 20, [(4, "x")])
    for _ in range(4):
        bench.step(finish=1)
    assert bench.submitted == ["x"]
