"""Ours decides what stock decides, step by step, whatever comes and however scarce everything is.

Of the random workloads, all but the first are for `make test-long`. `OMNI_SCHED_DIFFERENTIAL_SEEDS=5000` runs more of
them; a failure names its seed and how to run it again.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from tests.differential.lockstep import Lockstep, run_seed
from tests.differential.side import Candidate
from tests.differential.workload import Workload
from vllm_omni_sched import OmniScheduler

SEEDS = int(os.environ.get("OMNI_SCHED_DIFFERENTIAL_SEEDS", "200"))
BATCH = 20
OFTEN = 20  # that many in each run of the suite
MUST_HAPPEN = ("tokens", "encodes", "preemptions", "updates", "evictions", "aborts", "prefix", "deltas", "spilled")


def batches() -> list[Any]:
    """Return the first seed of each batch, those after the first `OFTEN` seeds marked as long."""
    firsts = range(0, SEEDS, BATCH)
    return [pytest.param(first, marks=pytest.mark.long if first >= OFTEN else ()) for first in firsts]


@pytest.mark.slow
@pytest.mark.parametrize("first", batches())
def test_random_workloads(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        counts.update(run_seed(seed, OmniScheduler))
    assert [name for name in MUST_HAPPEN if not counts[name]] == []


@pytest.mark.parametrize("use_v2_model_runner", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_sessions_that_are_preempted(async_scheduling: bool, use_v2_model_runner: bool) -> None:
    """Two sessions' worth of blocks for four: each is preempted again and again, and its items' data is wanted back."""
    counts: Counter[str] = Counter()
    for seed in range(10_000, 10_006):
        counts += run_seed(
            seed,
            OmniScheduler,
            options={"release_batch_items": 1, "metrics": False},
            async_scheduling=async_scheduling,
            use_v2_model_runner=use_v2_model_runner,
            worker_is_separate_process=True,
            num_blocks=20,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=64,
        )
    assert counts["preemptions"]
    assert counts["deltas"]
    assert counts["spilled"]
    if not use_v2_model_runner:  # V2 is sent preempted requests anew
        assert counts["restored"]


@pytest.mark.parametrize("disable_chunked_mm_input", [False, True])
def test_with_a_drafter_that_reads_behind_the_chunk(disable_chunked_mm_input: bool) -> None:
    """Check that an item that begins right behind a chunk is encoded with it, as under EAGLE."""
    counts: Counter[str] = Counter()
    for seed in range(50_000, 50_006):
        counts += run_seed(
            seed,
            OmniScheduler,
            read_ahead=1,
            disable_chunked_mm_input=disable_chunked_mm_input,
            max_num_batched_tokens=48,
        )
    assert counts["encodes"]
    assert counts["prefix"]


PLAIN = dict.fromkeys(("windows", "encoder_cache", "session_delta", "strip_frontier", "kv_event_window"), "off")


@pytest.mark.parametrize("first", [20_000, 20_010])
def test_nested_items(first: int) -> None:
    """Stock's bisecting loses items that lie within another, so ours is the measure: with windows and full messages for
    all, against ours with everything. Neither worker may ever miss an encoding or an item's data."""
    counts: Counter[str] = Counter()
    measure = Candidate(OmniScheduler, PLAIN | {"windows": "auto", "metrics": False})
    for seed in range(first, first + 10):
        counts += run_seed(seed, OmniScheduler, against=measure, nested_items=True, overlapping_items=0.5)
    assert counts["narrowed"]
    assert counts["deltas"]


@pytest.mark.parametrize("option", ["windows", "encoder_cache", "session_delta", "strip_frontier", "kv_event_window"])
def test_each_part_alone_and_each_left_out(option: str) -> None:
    for seed in (30_001, 30_002):
        run_seed(seed, OmniScheduler, options=PLAIN | {option: "auto", "metrics": False})
        run_seed(seed, OmniScheduler, options={option: "off", "metrics": False, "release_batch_items": 1})


def test_encoder_cache_manager_alone() -> None:
    """Our encoder cache manager is used alone, under stock's scheduler, by `--ec-manager-config`."""
    pytest.importorskip("vllm.config.ec_manager_config", reason="this vLLM has no --ec-manager-config")
    manager = Candidate(encoder_cache_manager_cls="vllm_omni_sched.OmniEncoderCacheManager")
    evictions = 0
    for seed in range(40_000, 40_005):
        evictions += Lockstep(Workload(seed), manager).run()["evictions"]
    assert evictions


def test_equal_workloads_have_equal_ends() -> None:
    """Compare stock with stock: what the other tests see is not chance."""
    assert run_seed(3, None) == run_seed(3, None)
