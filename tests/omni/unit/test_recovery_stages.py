"""Replicas of later stages that die: what the stages before have sent is used, or made again."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from tests.support.omni_stages import DIFFUSION, Rig, StageSpec, params
from vllm_omni_sched.omni.stages.recovery import recovery_driver

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

FIRST = StageSpec()
SECOND = StageSpec(final_output=True, edge=True)
SECOND_TWICE = StageSpec(replicas=2, final_output=True, edge=True)


async def test_what_is_sent_on_while_the_next_stage_has_none_is_kept() -> None:
    async with Rig(FIRST, SECOND) as rig:
        await rig.ask("a")
        rig.runtime.go.clear()
        await rig.kill(1)
        await rig.finish(0, "a")
        assert not rig.told("a")
        rig.runtime.go.set()
        await rig.settle()
        await rig.finish(1, "a")
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def test_a_payload_that_nobody_had_got_is_still_there_for_the_next_run() -> None:
    async with Rig(FIRST, SECOND_TWICE) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.kill(1, rig.replica_id(1, "a"))
        assert rig.replica(0).took == ["a"]
        await rig.finish(1, "a")
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def test_a_payload_that_is_gone_is_made_again() -> None:
    async with Rig(FIRST, SECOND_TWICE) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.step(1, "a")  # it has its input now
        await rig.kill(1, rig.replica_id(1, "a"))
        assert rig.replica(0).took == ["a", "a"], "connectors know payloads by that name"
        await rig.finish(0, *rig.at(0))
        await rig.finish(1, "a")
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()
        assert not rig.edges.lying


async def test_equal_requests_of_which_an_earlier_stage_runs_again_are_both_answered() -> None:
    async with Rig(FIRST, SECOND_TWICE) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.finish(0, "a")
        await rig.step(1, "a")
        await rig.kill(1, rig.replica_id(1, "a"))
        for stage_id in (0, 1):
            await rig.finish(stage_id, *rig.at(stage_id))
        assert rig.answer("a") == rig.answer("b") == rig.expected()
        assert not rig.left_over()


async def test_what_is_sent_on_right_after_a_death_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(FIRST, SECOND) as rig:
        monkeypatch.setattr(recovery_driver, "HELD_SECONDS", 0.3)
        await rig.ask("a", (1,))
        await rig.ask("b", (2,))
        await rig.finish(0, "a")
        assert rig.replica(1).input_of("a"), "it has taken the payload"
        rig.replica(1).dead = True
        await rig.turn()
        rig.replica(0).finish("b")
        await rig.settle()
        assert not rig.ends("b")
        for stage_id in (0, 1):
            await rig.finish(stage_id, *rig.at(stage_id))
        assert rig.answer("b") == rig.expected((2,))


async def test_with_async_chunks_diffusion_stages_run_again_too() -> None:
    async with Rig(FIRST, StageSpec(replicas=2, kind=DIFFUSION, final_output=True), async_chunk=True) as rig:
        await rig.ask("a", each=[params(), OmniDiffusionSamplingParams(seed=1)])
        await rig.kill(1, rig.replica_id(1, "a"))
        assert list(rig.at(0)) == list(rig.at(1)) != ["a"]
        for stage_id in (0, 1):
            await rig.finish(stage_id, *rig.at(stage_id))
        assert len(rig.ends("a")) == 1
        assert not rig.left_over()
