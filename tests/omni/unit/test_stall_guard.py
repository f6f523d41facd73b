"""A request that comes no further fails with a reason; one that streams, or waits its turn, does not."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL, FINAL_ONLY, Rig, StageSpec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

FIRST = StageSpec()
LAST = StageSpec(final_output=True, edge=True)
DEADLINE = {"runtime": {"stall_seconds": 100.0}}
LONG = tuple(range(30))


def given_up(rig: Rig, stage_id: int) -> dict[str, int]:
    return {reason: count for reason, count in rig.driver.board.stages[stage_id].given_up.items() if count}


@pytest.mark.parametrize("async_chunk", [False, True])
async def test_one_whose_input_never_comes_fails_with_a_reason(async_chunk: bool) -> None:
    async with Rig(FIRST, LAST, async_chunk=async_chunk, **DEADLINE) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        rig.edges.lying.clear()
        await rig.tick(99.0)
        assert not rig.told("a")
        await rig.tick(2.0)
        error = rig.error("a")
        assert error.startswith("Stage-1: replica 0")
        assert "input from stage 0 replica 0" in error
        assert "'runtime.stall_seconds' (100)" in error
        assert given_up(rig, 1) == {"stalled": 1}
        assert rig.replica(1).aborted == ["a"]
        assert not rig.left_over()


@pytest.mark.parametrize("kind", [None, FINAL_ONLY])
async def test_one_that_streams_does_not_however_long_it_takes(kind: object) -> None:
    async with Rig(FINAL, **DEADLINE) as rig:
        await rig.ask("a", LONG, params={"max_tokens": 64} | ({"output_kind": kind} if kind else {}))
        for _ in LONG[1:]:
            await rig.tick(90.0)
            await rig.step(0, "a")
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected(LONG)
        assert not given_up(rig, 0)


async def test_a_stage_that_is_fed_piece_by_piece_makes_progress_with_the_one_before() -> None:
    async with Rig(FIRST, LAST, async_chunk=True, **DEADLINE) as rig:
        await rig.ask("a", LONG, params={"max_tokens": 64})
        for _ in LONG[1:]:
            await rig.tick(90.0)
            await rig.step(0, "a")
        await rig.finish_all()
        assert rig.answer("a") == rig.expected(LONG)


async def test_all_who_share_a_work_that_stalls_fail() -> None:
    async with Rig(FINAL, **DEADLINE) as rig:
        for name in "ab":
            await rig.ask(name)
        await rig.tick(101.0)
        assert rig.error("a")
        assert rig.error("b")
        assert given_up(rig, 0) == {"stalled": 2}
        assert not rig.at(0)
        assert not rig.left_over()


async def test_a_session_waits_for_its_client() -> None:
    async with Rig(FINAL, **DEADLINE) as rig:
        await rig.ask("s", resumable=True)
        await rig.tick(1000.0)
        assert not rig.told("s")
