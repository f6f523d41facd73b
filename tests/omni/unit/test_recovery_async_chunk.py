"""Replicas that die in async-chunk mode: their requests run again in all stages."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import CUMULATIVE, DELTA, FINAL_ONLY, Rig, StageSpec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

FIRST = StageSpec()
FIRST_TWICE = StageSpec(replicas=2)
TWO = StageSpec(replicas=2, final_output=True)
SECOND = StageSpec(final_output=True, edge=True)
SECOND_TWICE = StageSpec(replicas=2, final_output=True, edge=True)


@pytest.mark.parametrize("dead", [0, 1])
async def test_it_runs_again_in_all_stages_under_a_new_name(dead: int) -> None:
    async with Rig(FIRST_TWICE, SECOND_TWICE, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.step(0, "a")
        await rig.kill(dead, rig.replica_id(dead, "a"))
        assert not rig.told("a")
        again = list(rig.at(0))
        assert again == list(rig.at(1)) != ["a"]
        assert rig.at(0)[again[0]].requests[again[0]].external_req_id == again[0], "connectors know pieces by that name"
        other = rig.at(1 - dead)[again[0]]
        assert (other.took, other.aborted) == (["a", *again], ["a"])
        await rig.finish_all()
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


@pytest.mark.parametrize("dead", [0, 1])
async def test_pieces_of_the_run_that_is_over_are_not_taken_and_do_not_lie_about(dead: int) -> None:
    async with Rig(FIRST_TWICE, SECOND_TWICE, async_chunk=True) as rig:
        await rig.ask("a")
        for piece in range(3):
            rig.edges.put("0", "1", f"a_0_{piece + 1}", [99])
        await rig.finish(0, "a")
        assert "a_0_0" in rig.edges.lying
        await rig.kill(dead, rig.replica_id(1, "a") if dead else 0)
        await rig.finish_all()
        assert rig.answer("a") == rig.expected()
        assert not rig.edges.lying
        assert not rig.left_over()


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
@pytest.mark.parametrize("dead", [0, 1])
async def test_its_client_hears_nothing_twice(kind: Any, dead: int) -> None:
    async with Rig(StageSpec(replicas=2, final_output=True), TWO, async_chunk=True) as rig:
        message = rig.message("a", (1, 2, 3, 4), params={"output_kind": kind})
        message.final_output_stage_ids = [0, 1]
        await rig.omni._dispatch_message(message)
        await rig.step(0, "a")
        await rig.step(0, "a")
        said = len(rig.told("a"))
        await rig.kill(dead, rig.replica_id(dead, "a"))
        again = next(iter(rig.at(0)))
        await rig.step(0, again)
        await rig.step(0, again)
        assert len(rig.told("a")) == said
        await rig.finish_all()
        heard = [one.engine_outputs.outputs[0].token_ids for one in rig.told("a") if one.stage_id == 0]
        thought = [token for part in heard for token in part] if kind is DELTA else list(heard[-1])
        assert thought == rig.expected((1, 2, 3, 4), stages=1)
        assert len(rig.ends("a")) == 1
        assert not rig.left_over()


async def test_what_an_engine_still_says_of_the_run_that_is_over_is_dropped() -> None:
    async with Rig(FIRST, TWO, async_chunk=True) as rig:
        await rig.ask("a")
        rig.replica(1, rig.replica_id(1, "a")).dead = True
        await rig.turn()
        rig.replica(0).requests["a"] = rig.replica(0).requests[next(iter(rig.at(0)))]
        rig.replica(0).say("a", [7], last=True)  # the abort has not reached it
        await rig.settle()
        await rig.finish_all()
        assert rig.answer("a")
        assert not rig.left_over()


async def test_what_was_finished_and_perhaps_not_sent_on_runs_again() -> None:
    async with Rig(FIRST_TWICE, SECOND, async_chunk=True) as rig:
        await rig.ask("a")
        at = rig.replica_id(0, "a")
        await rig.finish(0, "a")
        rig.edges.lying.clear()  # it died before it could send
        await rig.kill(0, at)
        await rig.finish_all()
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def test_what_was_taken_back_is_no_more_counted_where_it_ran() -> None:
    async with Rig(FIRST, SECOND, async_chunk=True) as rig:
        await rig.ask("a")
        board = rig.driver.board
        rig.runtime.go.clear()
        await rig.kill(1)
        assert not rig.at(0)
        facts = board.replicas[0, 0]
        assert (facts.running, facts.requests, facts.ended["aborted"]) == (0, {}, 1)
        await rig.abort("a")
        assert [one.running for one in board.replicas.values()] == [0, 0]
        rig.runtime.go.set()
        await rig.settle()
        assert (facts.running, facts.ended["aborted"]) == (0, 1)
        assert not rig.left_over()


async def test_what_waits_in_other_stages_does_not_start_before() -> None:
    async with Rig(FIRST, StageSpec(final_output=True, edge=True, max_num_seqs=1), async_chunk=True) as rig:
        for name in "ab":
            await rig.ask(name, (ord(name),))
        assert (list(rig.at(0)), list(rig.at(1))) == (["a", "b"], ["a"])
        rig.runtime.go.clear()
        await rig.kill(0)
        assert not rig.at(1), "it would wait for pieces, which has a limit"
        rig.runtime.go.set()
        await rig.settle()
        for _ in "ab":
            await rig.finish_all()
        assert [rig.answer(name) for name in "ab"] == [rig.expected((ord(name),)) for name in "ab"]
        assert not rig.left_over()


async def test_replicas_of_two_stages_that_die_at_once() -> None:
    async with Rig(FIRST, SECOND, async_chunk=True) as rig:
        await rig.ask("a")
        rig.replica(0).dead = rig.replica(1).dead = True
        await rig.settle()
        await rig.finish_all()
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def test_one_that_is_aborted_after_a_death_is_aborted_in_all_stages() -> None:
    async with Rig(FIRST, SECOND_TWICE, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.kill(1, rig.replica_id(1, "a"))
        await rig.abort("a")
        assert not rig.at(0)
        assert not rig.at(1)
        assert not rig.left_over()
