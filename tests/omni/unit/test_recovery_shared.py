"""Replicas that die in async-chunk mode, and work that several requests share."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import Rig, StageSpec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

FIRST = StageSpec()
FIRST_TWICE = StageSpec(replicas=2)
TWO = StageSpec(replicas=2, final_output=True)
SECOND = StageSpec(final_output=True, edge=True)
SECOND_TWICE = StageSpec(replicas=2, final_output=True, edge=True)


@pytest.mark.parametrize("dead", [0, 1])
async def test_equal_requests_are_both_answered(dead: int) -> None:
    async with Rig(FIRST_TWICE, SECOND_TWICE, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.kill(dead, rig.replica_id(dead, "a"))
        assert len(rig.at(0)) == len(rig.at(1)) == 1
        await rig.finish_all()
        assert rig.answer("a") == rig.answer("b") == rig.expected()
        assert not rig.left_over()


async def test_equal_requests_of_which_a_stage_was_through_are_both_answered() -> None:
    async with Rig(FIRST, SECOND_TWICE, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.finish(0, "a")
        await rig.kill(1, rig.replica_id(1, "a"))
        await rig.finish_all()
        assert rig.answer("a") == rig.answer("b") == rig.expected()
        assert not rig.left_over()


@pytest.mark.parametrize("leaves", ["a", "b"])
async def test_one_that_leaves_before_leaves_the_work_to_the_other(leaves: str) -> None:
    async with Rig(FIRST, SECOND_TWICE, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.abort(leaves)
        await rig.kill(1, rig.replica_id(1, "a"))
        await rig.finish_all()
        assert rig.answer("b" if leaves == "a" else "a") == rig.expected()
        assert not rig.left_over()


@pytest.mark.parametrize("leaves", ["a", "b"])
async def test_one_that_leaves_while_the_work_waits_leaves_it_to_the_other(leaves: str) -> None:
    async with Rig(FIRST, SECOND, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.ask("b")
        rig.runtime.go.clear()
        await rig.kill(1)
        await rig.abort(leaves)
        rig.runtime.go.set()
        await rig.settle()
        await rig.finish_all()
        assert rig.answer("b" if leaves == "a" else "a") == rig.expected()
        assert not rig.left_over()


async def test_when_all_leave_while_it_waits_it_runs_no_more() -> None:
    async with Rig(FIRST, SECOND, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.ask("b")
        rig.runtime.go.clear()
        await rig.kill(1)
        await rig.abort("a")
        await rig.abort("b")
        rig.runtime.go.set()
        await rig.settle()
        assert not rig.at(0)
        assert not rig.at(1)
        assert not rig.left_over()
