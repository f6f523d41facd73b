"""The host tier on the real scheduler, with a worker that only keeps books (see `harness/bench.py`)."""

from __future__ import annotations

import random

import pytest

from tests.engine.harness.bench import EMBEDS, ITEM_BYTES, Bench
from vllm_omni_sched.monitor.counts import SchedulerMetrics


def bench_with(items: int, **config) -> Bench:
    """Make a bench with an encoder cache of two items and a host tier of ``items``."""
    return Bench(encoder_cache_size=2 * EMBEDS, host_bytes=items * ITEM_BYTES, **config)


def ask(bench: Bench, *names: str) -> None:
    """One request after the other with one item each, alone, until it is over."""
    for name in names:
        bench.add(f"{name}-{len(bench.left)}", 20, [(4, name)], max_tokens=1)
        for _ in range(8):
            bench.step(finish=1)
        assert not bench.scheduler.requests


def counts(bench: Bench) -> SchedulerMetrics:
    metrics = SchedulerMetrics()
    bench.scheduler.encoder_cache_manager.count_into(metrics)
    bench.planner.count_into(metrics)
    return metrics


def test_what_was_evicted_is_restored_and_not_encoded_again():
    bench = bench_with(4)
    ask(bench, "a", "b", "c")
    assert (bench.host, bench.cache) == ({"a"}, {"b", "c"})
    ask(bench, "a")
    assert bench.restored == ["a"]
    assert bench.in_step == ["a", "b", "c"]
    assert bench.submitted == []
    assert bench.cache == {"c", "a"}


def test_beside_somebody_who_decodes_a_restore_does_not_wait_for_the_lane():
    bench = bench_with(4)
    ask(bench, "a", "b", "c")
    bench.decode()
    bench.add("again", 20, [(4, "a")])
    assert bench.step().num_scheduled_tokens == {"text": 1, "again": 20}
    assert (bench.restored, bench.submitted) == (["a"], [])


def test_a_restored_encoding_stays_in_host_memory_and_is_not_copied_twice():
    bench = bench_with(4)
    ask(bench, "a", "b", "c", "a", "b", "c", "a")
    assert bench.restored == ["a", "b", "c", "a"]
    assert bench.host == {"a", "b", "c"}
    found = counts(bench)
    assert (found.host_offers["restore_is_quicker"], found.host_offers["already_kept"]) == (3, 2)


def test_a_worker_that_could_not_keep_it_costs_an_encode_and_no_more():
    bench = bench_with(4)
    bench.no_room_for = {"a"}
    ask(bench, "a", "b", "c", "a")
    assert (bench.restored, bench.in_step) == ([], ["a", "b", "c", "a"])
    assert "a" not in bench.planner.host.tier
    assert counts(bench).host_tier_bytes == ITEM_BYTES


def test_it_is_not_asked_for_before_the_worker_has_said_that_it_is_there():
    """Under async scheduling a step is scheduled before it is known what became of the one before."""
    bench = bench_with(4, async_scheduling=True)
    ask(bench, "a", "b")
    bench.add("c", 20, [(4, "c")], max_tokens=5)
    evicting = bench.step()
    assert [mm_hash for mm_hash, _ in evicting.ec_connector_metadata.host.keep] == ["a"]
    assert not bench.planner.is_ready("a")
    bench.step()
    assert bench.planner.is_ready("a")


def test_resetting_the_encoder_cache_empties_the_tier():
    bench = bench_with(4)
    ask(bench, "a", "b", "c")
    bench.scheduler.reset_encoder_cache()
    bench.cache = set()
    assert not bench.planner.is_ready("a")
    ask(bench, "a")
    assert bench.host == set()
    assert (bench.restored, bench.in_step) == ([], ["a", "b", "c", "a"])
    assert counts(bench).host_tier_bytes == 0


def test_what_was_encoded_before_the_weights_may_have_changed_is_not_kept_when_it_is_evicted():
    bench = bench_with(4)
    ask(bench, "a")
    bench.scheduler.omni.forget_encodings()
    ask(bench, "b", "c", "d")  # evicts a, which the encoder cache still had, and then b
    assert bench.host == {"b"}


def test_another_item_of_the_same_name_is_encoded_and_takes_the_place_of_the_first():
    bench = bench_with(4)
    ask(bench, "a", "b", "c")
    bench.data["a"] = 7
    ask(bench, "a")
    assert (bench.restored, bench.in_step) == ([], ["a", "b", "c", "a"])
    assert counts(bench).kept_not_reused["other_content"] == 1
    ask(bench, "d", "e", "a")
    assert bench.restored == ["a"]


def test_an_item_whose_data_the_engine_core_cannot_read_is_not_kept():
    bench = bench_with(4)
    bench.data["a"] = {"address": None}
    ask(bench, "a", "b", "c")
    assert bench.host == set()
    assert counts(bench).kept_not_reused["unknown_content"] == 1


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_nothing_is_restored_from_nothing(seed: int, async_scheduling: bool):
    """Few blocks, a cache and a tier of few items, items that come back, aborts, a worker that loses some, resets.

    The worker of `Bench` asserts that what a step needs is in its cache, that restores come from what it holds, and
    that host memory stays in its bound.
    """
    chance = random.Random(seed)
    bench = Bench(
        async_scheduling=async_scheduling,
        host_bytes=chance.choice([1, 3, 8, 100]) * ITEM_BYTES,
        encoder_cache_size=chance.choice([EMBEDS, 24, 40]),
        num_blocks=chance.choice([12, 40, 400]),
        max_num_batched_tokens=chance.choice([16, 64, 300]),
        enable_prefix_caching=chance.random() < 0.5,
        max_num_seqs=chance.choice([2, 16]),
    )
    bench.no_room_for = {"item-2"} if chance.random() < 0.3 else set()
    bench.churn(chance, 40, lambda: min(chance.randrange(12), chance.randrange(12)))
    bench.step()
    assert set(bench.planner.host.tier._kept) == bench.host
    assert set(bench.scheduler.encoder_cache_manager.cached) == bench.cache
    found = counts(bench)
    assert found.host_tier_bytes == len(bench.host) * ITEM_BYTES
    assert found.encoder_tier_host == len(bench.restored)
