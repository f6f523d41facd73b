"""Long work waits for its turn; short work does not wait for it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from tests.support.omni_stages import DIFFUSION, FINAL, Rig, StageSpec
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.omni.stages.reports.memory import HostMemory
from vllm_omni_sched.omni.stages.requests import features_of
from vllm_omni_sched.resource.pipeline.stage_limits import units_of

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

TWO = StageSpec(replicas=2, final_output=True)


def long(first: int) -> tuple[int, ...]:
    return (first, *range(100))


def progressive(target_latency_ms: float = 1000.0, **how: Any) -> dict[str, Any]:
    return {"target_latency_ms": target_latency_ms, "progressive": {"enabled": True, **how}}


async def test_long_prompts_start_in_turn_and_short_ones_beside_them() -> None:
    async with Rig(FINAL, batching=progressive()) as rig:
        for i in range(4):
            await rig.ask(f"long {i}", long(i))
        await rig.ask("short", (7,))
        assert list(rig.at(0)) == ["long 0", "short"]
        await rig.step(0, "long 0")  # its prompt is through, in time: twice as much now
        assert list(rig.at(0)) == ["long 0", "short", "long 1", "long 2"]
        await rig.step(0, "long 1")
        assert list(rig.at(0)) == ["long 0", "short", "long 1", "long 2", "long 3"]
        await rig.finish(0, *rig.at(0))
        for i in range(4):
            assert rig.answer(f"long {i}") == rig.expected(long(i))
        assert not rig.left_over()


async def test_one_that_leaves_makes_room() -> None:
    async with Rig(FINAL, batching=progressive()) as rig:
        for i in range(2):
            await rig.ask(f"{i}", long(i))
        await rig.abort("0")
        assert list(rig.at(0)) == ["1"]


async def test_a_death_makes_room() -> None:
    async with Rig(TWO, batching=progressive(), runtime={"recovery": {"restart": False}}) as rig:
        for i in range(2):
            await rig.ask(f"{i}", long(i))
        await rig.kill(0, 0)
        await rig.finish(0, *rig.at(0))
        await rig.settle()
        for i in range(2):
            assert rig.answer(f"{i}") == rig.expected(long(i))
        assert not rig.left_over()


async def test_pictures_are_as_long_as_their_steps_and_latents() -> None:
    params = OmniDiffusionSamplingParams(width=512, height=256, num_inference_steps=20)
    features = features_of(None, params)
    assert units_of(StageKind.DIFFUSION, features) == 20 * 32 * 16
    drawing = StageSpec(final_output=True, kind=DIFFUSION, max_num_seqs=2)
    async with Rig(drawing, batching=progressive()) as rig:
        for i in range(2):
            await rig.ask(f"{i}", (i,), each=[params])
        assert list(rig.at(0)) == ["0"]


async def test_short_memory_makes_the_batch_limit_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "used", lambda self, now: 0.99)
    async with Rig(FINAL, batching={"target_latency_ms": 1000.0, "memory_high": 0.5}) as rig:
        for number in range(20):
            await rig.ask(f"{number}", (number,))
            rig.now += 0.1
            await rig.finish(0, f"{number}")
        assert rig.omni.stage_pools[0].queue.stage.replicas[0].load.control.limit < 8
