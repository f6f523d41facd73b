"""What an option turns off is not there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL, Rig, StageSpec
from vllm_omni_sched.core.pipeline.events import LimitsRaised
from vllm_omni_sched.resource.batch_size import LimitReason

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]


async def slow_batches(rig: Rig) -> Any:
    """Run three full batches that take far too long; return the replica's limit after them."""
    for number in range(3):
        for i in range(8):
            await rig.ask(f"{number}.{i}", (100 * number + i, 1))
        while rig.at(0):
            rig.now += 10.0
            running = list(rig.at(0))
            await rig.step(0, *running)
            await rig.finish(0, *running)
    return rig.omni.stage_pools[0].queue.stage.replicas[0].load.limit


@pytest.mark.parametrize(
    ("batching", "steered"),
    [
        ({}, True),
        ({"enabled": False}, False),
        ({"stages": {0: {"enabled": False}}}, False),
        ({"enabled": False, "stages": {"stage0": {"enabled": True}}}, True),
    ],
)
async def test_a_batch_limit_that_is_not_steered_is_the_stages_own(batching: dict[str, Any], steered: bool) -> None:
    async with Rig(FINAL, batching={"target_latency_ms": 100.0, **batching}) as rig:
        limit = await slow_batches(rig)
        assert (limit.limit < 8) == steered
        assert (limit.reason is LimitReason.FIXED) != steered
        assert steered or limit.limit == FINAL.max_num_seqs


async def test_it_is_the_operators_where_that_is_less() -> None:
    async with Rig(FINAL, batching={"enabled": False, "max_batch_size": 3}) as rig:
        for i in range(5):
            await rig.ask(f"{i}", (i,))
        assert len(rig.at(0)) == 3
        rig.omni.stage_pools[0].queue.handle(LimitsRaised(0, 5))
        await rig.ask("5", (5,))
        assert len(rig.at(0)) == 3


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
