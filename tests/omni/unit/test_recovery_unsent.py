"""Replicas that die between saying that they are done and sending what they have made: it is made again, once."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import DELTA, FINAL_ONLY, Rig, StageSpec, params

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


async def test_one_that_waits_for_its_turn_in_the_next_stage_runs_again_too() -> None:
    async with Rig(TWICE, ONE_AT_A_TIME) as rig:
        await rig.ask("a", (1,))
        await rig.ask("b", (2,))
        await rig.finish(0, "a")
        at = rig.replica_id(0, "b")
        await finish_unsent(rig, 0, "b")
        assert list(rig.at(1)) == ["a"]
        await rig.kill(0, at)
        await finish_all(rig)
        assert [rig.answer(name) for name in "ab"] == [rig.expected((1,)), rig.expected((2,))]
        assert not rig.left_over()


async def test_so_does_one_for_which_the_next_stage_has_no_replica() -> None:
    async with Rig(TWICE, LAST) as rig:
        await rig.ask("a")
        at = rig.replica_id(0, "a")
        rig.runtime.go.clear()
        await rig.kill(1)
        await finish_unsent(rig, 0, "a")
        await rig.kill(0, at)
        rig.runtime.go.set()
        await rig.settle()
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


async def test_an_abort_afterwards_leaves_nothing() -> None:
    async with Rig(TWICE, LAST) as rig:
        await rig.ask("a")
        at = rig.replica_id(0, "a")
        await finish_unsent(rig, 0, "a")
        await rig.kill(0, at)
        await rig.abort("a")
        assert not rig.at(0)
        assert not rig.at(1)
        assert not rig.left_over()


async def test_what_the_run_that_is_over_still_says_is_dropped() -> None:
    async with Rig(TWICE, LAST) as rig:
        await rig.ask("a")
        at = rig.replica_id(0, "a")
        await finish_unsent(rig, 0, "a")
        old = rig.replica(1).requests["a"]
        await rig.kill(0, at)
        rig.replica(1).requests["a"] = old
        rig.replica(1).say("a", [7], last=True)  # the abort has not reached it
        await rig.settle()
        assert not rig.told("a")
        await finish_all(rig)
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def test_its_client_hears_nothing_twice() -> None:
    async with Rig(StageSpec(replicas=2, final_output=True), LAST) as rig:
        message = rig.message("a", (1, 2, 3), params={"output_kind": DELTA})
        message.final_output_stage_ids = [0, 1]
        await rig.omni._dispatch_message(message)
        at = rig.replica_id(0, "a")
        await finish_unsent(rig, 0, "a")
        await rig.kill(0, at)
        await finish_all(rig)
        for stage_id in (0, 1):
            told = [one.engine_outputs for one in rig.told("a") if one.stage_id == stage_id]
            heard = [token for one in told for token in one.outputs[0].token_ids]
            assert heard == rig.expected((1, 2, 3), stages=stage_id + 1)
            assert sum(one.finished for one in told) == 1
        assert len(rig.ends("a")) == 1
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


async def test_a_session_whose_input_is_lost_fails() -> None:
    async with Rig(TWICE, LAST) as rig:
        await rig.ask("s", resumable=True)
        rig.omni.recovery.handovers.finished(0, 0, "s", ["s"])
        rig.omni.request_states["s"].finished_stage_ids.add(0)
        await rig.kill(0, 0)
        assert rig.error("s")
