"""Replicas that die between saying that they are done and sending what they have made: it is made again, once."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL_ONLY, Rig, StageSpec, params

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

TWICE = StageSpec(replicas=2)
ONCE = StageSpec()
LAST = StageSpec(final_output=True, edge=True)
ONE_AT_A_TIME = StageSpec(final_output=True, edge=True, max_num_seqs=1)


async def finish_unsent(rig: Rig, stage_id: int, *names: str) -> None:
    """A stage says that it is done, and has sent nothing."""
    before = set(rig.edges.lying)
    await rig.finish(stage_id, *names)
    for sent in rig.edges.lying.keys() - before:
        del rig.edges.lying[sent]


async def finish_all(rig: Rig) -> None:
    while any(rig.at(stage_id) for stage_id in range(len(rig.stages))):
        await rig.finish_all()


@pytest.mark.parametrize("async_chunk", [False, True])
@pytest.mark.parametrize("stages", [(TWICE, LAST), (ONCE, LAST), (ONCE, StageSpec(replicas=2, edge=True), LAST)])
async def test_what_was_finished_and_not_sent_runs_again(stages: tuple[StageSpec, ...], async_chunk: bool) -> None:
    async with Rig(*stages, async_chunk=async_chunk) as rig:
        await rig.ask("a")
        dying = len(stages) - 2
        for stage_id in range(dying):
            await rig.finish(stage_id, "a")
        at = rig.replica_id(dying, "a")
        await finish_unsent(rig, dying, "a")
        await rig.kill(dying, at)
        assert not rig.told("a")
        await finish_all(rig)
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()
        assert not rig.edges.lying


async def test_what_was_sent_is_not_made_again() -> None:
    async with Rig(TWICE, LAST) as rig:
        await rig.ask("a")
        at = rig.replica_id(0, "a")
        await rig.finish(0, "a")
        await rig.kill(0, at)
        assert not rig.at(0)
        assert rig.replica(1).took == ["a"]
        await finish_all(rig)
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()
        assert not rig.edges.lying


@pytest.mark.parametrize("how", [{}, {"params": {"output_kind": FINAL_ONLY}}], ids=["streamed", "final only"])
async def test_what_the_next_stage_has_begun_to_answer_does_not_run_again(how: dict[str, Any]) -> None:
    async with Rig(TWICE, LAST) as rig:
        await rig.ask("a", **how)
        at = rig.replica_id(0, "a")
        await rig.finish(0, "a")
        await rig.step(1, "a")
        await rig.kill(0, at)
        assert not rig.at(0)
        await finish_all(rig)
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


@pytest.mark.parametrize("parted", [False, True])
async def test_all_who_shared_it_are_answered(parted: bool) -> None:
    async with Rig(TWICE, LAST) as rig:
        for name, most in zip("abc", (16, 15 if parted else 16, 16), strict=True):
            await rig.ask(name, each=[params(), params(max_tokens=most)])
        at = rig.replica_id(0, "a")
        assert list(rig.at(0)) == ["a"]
        await finish_unsent(rig, 0, "a")
        await rig.kill(0, at)
        await finish_all(rig)
        assert [rig.answer(name) for name in "abc"] == [rig.expected()] * 3
        assert not rig.left_over()
        assert not rig.edges.lying


@pytest.mark.parametrize("is_next_stage_busy", [False, True])
async def test_a_follower_that_took_over_an_unsent_request_is_answered(is_next_stage_busy: bool) -> None:
    async with Rig(TWICE, ONE_AT_A_TIME if is_next_stage_busy else LAST) as rig:
        if is_next_stage_busy:
            await rig.ask("x", (9,))
            await rig.finish(0, "x")
        await rig.ask("a")
        await rig.ask("b")
        at = rig.replica_id(0, "a")
        await finish_unsent(rig, 0, "a")
        await rig.abort("a")
        await rig.kill(0, at)
        await finish_all(rig)
        assert rig.answer("b") == rig.expected()
        assert not rig.left_over()


async def test_the_next_replica_that_dies_before_it_sends_counts_as_another_death() -> None:
    async with Rig(TWICE, LAST, runtime={"recovery": {"max_redispatches": 2}}) as rig:
        await rig.ask("a")
        for _ in range(3):
            assert not rig.told("a")
            name = next(iter(rig.at(0)))
            at = rig.replica_id(0, name)
            await finish_unsent(rig, 0, name)
            await rig.kill(0, at)
        assert "redispatches" in rig.error("a")
        assert not rig.left_over()


async def test_both_ends_of_an_edge_may_die() -> None:
    async with Rig(TWICE, LAST) as rig:
        await rig.ask("a")
        at = rig.replica_id(0, "a")
        await finish_unsent(rig, 0, "a")
        rig.replica(0, at).dead = rig.replica(1).dead = True
        await rig.settle()
        await finish_all(rig)
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()
