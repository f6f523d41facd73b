"""What an option turns off is not there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL, Rig, StageSpec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]


async def slow_batches(rig: Rig) -> Any:
    """Run three full batches that take far too long; return the replica's load after them."""
    for number in range(3):
        for i in range(8):
            await rig.ask(f"{number}.{i}", (100 * number + i, 1))
        while rig.at(0):
            rig.now += 10.0
            running = list(rig.at(0))
            await rig.step(0, *running)
            await rig.finish(0, *running)
    return rig.omni.stage_pools[0].queue.stage.replicas[0].load


@pytest.mark.parametrize(
    ("batching", "controlled"),
    [
        ({}, False),
        ({"target_latency_ms": 100.0}, True),
        ({"stages": {0: {"target_latency_ms": 100.0}}}, True),
        ({"stages": {1: {"target_latency_ms": 100.0}}}, False),
    ],
)
async def test_without_a_target_a_stage_runs_as_many_as_its_engine(batching: dict[str, Any], controlled: bool) -> None:
    """However slow they are, and however many of them are there."""
    async with Rig(FINAL, FINAL, batching=batching) as rig:
        load = await slow_batches(rig)
        assert (load.control is not None) == controlled
        assert (rig.driver.memory is not None) == bool(batching)  # of the host, which nothing else asks for
        for i in range(20):
            await rig.ask(f"last {i}", (1000 + i,))
        assert (len(rig.at(0)) < FINAL.max_num_seqs) == controlled
        assert controlled or len(rig.at(0)) == 2 * FINAL.max_num_seqs  # of which half wait in the engine


@pytest.mark.parametrize("first", [{}, {"params": {"extra_args": {"omni_class": "batch"}}}])
async def test_few_wait_in_an_engine_once_there_is_something_to_choose(first: dict[str, Any]) -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("first", (999,), **first)
        for i in range(20):
            await rig.ask(f"{i}", (1000 + i,))
        assert len(rig.at(0)) == FINAL.max_num_seqs * (5 if first else 8) // 4


async def test_requests_that_decode_are_not_limited() -> None:
    async with Rig(FINAL, batching={"target_latency_ms": 100.0, "max_batch_size": 1}) as rig:
        for i in range(5):
            await rig.ask(f"{i}", (i, 1, 2))
        for i in range(4):
            assert list(rig.at(0)) == [f"{one}" for one in range(i + 1)]
            await rig.step(0, f"{i}")
        assert len(rig.at(0)) == 5


async def test_a_stage_that_reads_chunks_has_no_controller() -> None:
    """It starts with the stage that it reads, whose time no limit of its own could lower."""
    async with Rig(StageSpec(), FINAL, async_chunk=True, batching={"target_latency_ms": 100.0}) as rig:
        controls = [pool.queue.stage.replicas[0].load.control for pool in rig.omni.stage_pools]
        assert [one is not None for one in controls] == [True, False]


@pytest.mark.parametrize("enabled", [True, False])
async def test_stages_that_are_not_watched_cost_no_looks(enabled: bool) -> None:
    async with Rig(StageSpec(), FINAL, monitoring={"enabled": enabled, "anomaly": {"max_stage_seconds": 10.0}}) as rig:
        await rig.ask("a")
        await rig.tick(20.0)
        await rig.finish(0, "a")
        await rig.finish(1, "a")
        assert rig.answer("a") == rig.expected()
        assert (rig.driver.board.stages[0].anomalies["stage_timeout"] > 0) == enabled
        assert bool(rig.driver.board.edges) == enabled


@pytest.mark.parametrize("enabled", [True, False])
async def test_stages_that_are_not_watched_have_no_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, enabled: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    async with Rig(FINAL, monitoring={"enabled": enabled}) as rig:
        publisher = type(rig.driver).publish(rig.driver)
        try:
            assert any(path.is_file() for path in tmp_path.rglob("*")) == enabled
        finally:
            publisher.close()
