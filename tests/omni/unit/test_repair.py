"""Replicas that die: their requests run elsewhere, once, and they are started again."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import CUMULATIVE, DELTA, DIFFUSION, FINAL, FINAL_ONLY, Rig, StageSpec, params
from vllm_omni_sched.omni.stages import repair

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

FIRST = StageSpec()
TWO = StageSpec(replicas=2, final_output=True)
SECOND = StageSpec(final_output=True, edge=True)
SECOND_TWICE = StageSpec(replicas=2, final_output=True, edge=True)


def recovery(**how: Any) -> dict[str, Any]:
    return {"runtime": {"recovery": how}}


async def test_a_request_of_a_dead_replica_runs_on_another() -> None:
    async with Rig(TWO) as rig:
        await rig.ask("a")
        await rig.kill(0, 0)
        assert rig.replica_id(0, "a") == 1
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
async def test_its_client_hears_nothing_twice(kind: Any) -> None:
    async with Rig(TWO) as rig:
        await rig.ask("a", (1, 2, 3, 4), params={"output_kind": kind})
        await rig.step(0, "a")
        await rig.step(0, "a")
        said = len(rig.told("a"))
        await rig.kill(0, 0)
        await rig.step(0, "a")
        await rig.step(0, "a")
        assert len(rig.told("a")) == said
        await rig.step(0, "a")
        await rig.finish(0, "a")
        assert (rig.heard if kind is DELTA else rig.answer)("a") == rig.expected((1, 2, 3, 4))


async def test_others_go_on_as_if_nothing_was() -> None:
    async with Rig(TWO) as rig:
        await rig.ask("a", (1,))
        await rig.ask("b", (2,))
        await rig.kill(0, rig.replica_id(0, "a"))
        assert sorted(rig.at(0)) == ["a", "b"]
        await rig.finish(0, "b", "a")
        assert (rig.answer("a"), rig.answer("b")) == (rig.expected((1,)), rig.expected((2,)))


async def test_a_replica_that_died_is_started_again_and_gets_requests() -> None:
    async with Rig(FINAL) as rig:
        before = rig.replica(0)
        await rig.kill(0)
        assert before.down
        assert rig.runtime.started == [(0, 0)]
        await rig.ask("a")
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def test_requests_wait_for_the_only_replica() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        rig.runtime.go.clear()
        await rig.kill(0)
        assert rig.replica(0) is None
        rig.runtime.go.set()
        await rig.settle()
        assert list(rig.at(0)) == ["a"]
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()


async def test_what_comes_while_there_is_no_replica_is_kept() -> None:
    async with Rig(FINAL) as rig:
        rig.runtime.go.clear()
        await rig.kill(0)
        for name in "abc":
            await rig.ask(name, (ord(name),))
        await rig.abort("b")
        assert not rig.told("a")
        rig.runtime.go.set()
        await rig.settle()
        assert sorted(rig.at(0)) == ["a", "c"]
        await rig.finish(0, "a", "c")
        assert rig.answer("c") == rig.expected((ord("c"),))
        assert not rig.told("b")
        assert not rig.left_over()


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


async def test_so_does_one_of_three_stages() -> None:
    middle = StageSpec(replicas=2, edge=True)
    async with Rig(FIRST, middle, SECOND_TWICE) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.finish(1, "a")
        await rig.step(2, "a")
        await rig.kill(2, rig.replica_id(2, "a"))
        for stage_id in range(3):
            await rig.finish(stage_id, *rig.at(stage_id))
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def test_equal_requests_that_ran_there_are_both_answered() -> None:
    async with Rig(TWO) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.step(0, "a")
        await rig.kill(0, 0)
        assert list(rig.at(0)) == ["a"]
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.answer("b") == rig.expected()
        assert not rig.left_over()


async def test_those_to_whom_the_work_was_handed_over_are_answered_too() -> None:
    async with Rig(TWO) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.abort("a")
        await rig.kill(0, 0)
        for name in list(rig.at(0)):
            await rig.finish(0, name)
        assert rig.answer("b") == rig.expected()
        assert not rig.left_over()


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


async def test_one_that_is_aborted_while_it_waits_for_a_place_runs_no_more() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        rig.runtime.go.clear()
        await rig.kill(0)
        await rig.abort("a")
        rig.runtime.go.set()
        await rig.settle()
        assert not rig.at(0)
        assert not rig.left_over()


async def test_a_leader_that_is_aborted_then_hands_over() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        await rig.ask("b")
        rig.runtime.go.clear()
        await rig.kill(0)
        await rig.abort("a")
        rig.runtime.go.set()
        await rig.settle()
        assert list(rig.at(0)) == ["b"]
        await rig.finish(0, "b")
        assert rig.answer("b") == rig.expected()
        assert not rig.left_over()


async def test_one_that_may_be_what_kills_is_given_up() -> None:
    async with Rig(StageSpec(replicas=4, final_output=True), **recovery(max_redispatches=9)) as rig:
        await rig.ask("a")
        for _ in range(3):
            assert not rig.told("a")
            await rig.kill(0, rig.replica_id(0, "a"))
        assert "poison" in rig.error("a")
        assert not rig.at(0)
        assert not rig.left_over()


async def test_one_that_moved_too_often_is_given_up() -> None:
    async with Rig(StageSpec(replicas=3, final_output=True), **recovery(max_redispatches=1)) as rig:
        await rig.ask("a")
        await rig.ask("b")  # shares its fate
        for _ in range(2):
            await rig.kill(0, rig.replica_id(0, "a"))
        assert "redispatches" in rig.error("a")
        assert "redispatches" in rig.error("b")
        assert not rig.left_over()


async def test_a_start_that_fails_is_tried_again_after_a_while() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        rig.runtime.fails = 1
        await rig.kill(0)
        assert rig.runtime.started == []
        await rig.tick(0.1)
        assert rig.runtime.started == []
        await rig.tick(2.0)
        assert rig.runtime.started == [(0, 0)]
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def test_when_no_replica_is_left_or_coming_requests_fail() -> None:
    async with Rig(FINAL, **recovery(restart=False)) as rig:
        await rig.ask("a")
        await rig.kill(0)
        assert "no_replica" in rig.error("a")
        await rig.ask("b")
        await rig.settle()
        assert "no live replica" in rig.error("b")
        assert not rig.left_over()


async def test_one_that_waited_too_long_fails() -> None:
    async with Rig(FINAL, **recovery(max_wait_seconds=5.0)) as rig:
        await rig.ask("a")
        rig.runtime.go.clear()
        await rig.kill(0)
        await rig.tick(4.0)
        assert not rig.told("a")
        await rig.tick(2.0)
        assert "waited" in rig.error("a")
        assert not rig.left_over()


async def test_what_was_kept_fails_when_no_replica_comes_back() -> None:
    async with Rig(FINAL, **recovery(max_restarts=1, max_wait_seconds=5.0)) as rig:
        rig.runtime.go.clear()
        rig.runtime.fails = 1
        await rig.kill(0)
        await rig.ask("a")
        rig.runtime.go.set()
        await rig.settle()
        await rig.tick(10.0)
        assert rig.error("a")


async def test_what_comes_between_two_attempts_is_kept() -> None:
    async with Rig(FINAL) as rig:
        rig.runtime.fails = 1
        await rig.kill(0)
        await rig.ask("a")
        await rig.settle()
        assert not rig.told("a")
        await rig.tick(2.0)
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()


async def test_what_is_sent_on_right_after_a_death_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(FIRST, SECOND) as rig:
        monkeypatch.setattr(repair, "HELD_SECONDS", 0.3)
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


async def test_a_request_that_is_sent_to_a_dead_replica_goes_elsewhere() -> None:
    async with Rig(TWO) as rig:
        rig.replica(0, 0).dead = True  # and nobody has noticed
        await rig.ask("a")
        await rig.settle()
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def test_requests_that_are_sent_there_together_go_elsewhere() -> None:
    async with Rig(FINAL) as rig:
        rig.runtime.go.clear()
        rig.omni.stage_pools[0].queue._releasing = True  # a release is on its way
        for name in "abc":
            await rig.ask(name, (ord(name),))
        rig.omni.stage_pools[0].queue._releasing = False
        rig.replica(0).dead = True
        await rig.omni.release()
        rig.runtime.go.set()
        await rig.settle()
        await rig.finish(0, *rig.at(0))
        assert [rig.answer(name) for name in "abc"] == [rig.expected((ord(name),)) for name in "abc"]
        assert not rig.left_over()


async def test_requests_that_are_moved_together_to_one_that_dies_too_are_moved_again() -> None:
    async with Rig(StageSpec(replicas=2, final_output=True), **recovery(max_redispatches=9)) as rig:
        for i in range(6):
            await rig.ask(f"{i}", (i,))
        for i in (0, 1):
            rig.replica(0, i).dead = True
        await rig.settle()
        for i in range(6):
            assert not rig.told(f"{i}")
        await rig.finish(0, *rig.at(0))
        assert [rig.answer(f"{i}") for i in range(6)] == [rig.expected((i,)) for i in range(6)]
        assert not rig.left_over()


async def test_a_session_fails_with_its_replica() -> None:
    async with Rig(TWO) as rig:
        await rig.ask("s", resumable=True)
        await rig.kill(0, rig.replica_id(0, "s"))
        assert rig.error("s")
        assert set(rig.left_over()) <= {"processor of stage 0"}, "which vLLM-Omni keeps too"


async def test_an_error_of_a_second_run_is_an_error() -> None:
    async with Rig(TWO) as rig:
        await rig.ask("a")
        await rig.kill(0, 0)
        rig.at(0)["a"].say("a", [], error=True)
        await rig.settle()
        assert rig.error("a")
        assert not rig.left_over()


async def test_an_error_of_a_stage_that_is_run_again_is_an_error() -> None:
    async with Rig(FIRST, SECOND_TWICE) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.step(1, "a")
        await rig.kill(1, rig.replica_id(1, "a"))
        name = next(iter(rig.at(0)))
        rig.replica(0).say(name, [], error=True)
        await rig.settle()
        assert rig.error("a")


async def test_a_diffusion_stage_is_repaired_as_others_are() -> None:
    async with Rig(StageSpec(replicas=2, kind=DIFFUSION, final_output=True)) as rig:
        await rig.ask("a", params={"seed": 1})
        await rig.kill(0, rig.replica_id(0, "a"))
        await rig.finish(0, "a")
        assert len(rig.ends("a")) == 1
        assert not rig.left_over()


async def test_with_async_chunks_requests_of_a_dead_replica_fail_and_it_is_started_again() -> None:
    """The pieces that its other stages have got come no second time."""
    async with Rig(FIRST, TWO, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.kill(1, rig.replica_id(1, "a"))
        assert "pieces" in rig.error("a")
        assert rig.replica(0).aborted == ["a"]
        assert len(rig.runtime.started) == 1
        await rig.ask("b", (2,))
        for stage_id in (0, 1):
            await rig.finish(stage_id, *rig.at(stage_id))
        assert rig.answer("b")
        assert not rig.left_over()


async def test_switched_off_a_death_is_what_it_is_in_vllm_omni() -> None:
    async with Rig(TWO, **recovery(enabled=False)) as rig:
        await rig.ask("a", (1,))
        await rig.ask("b", (2,))
        await rig.kill(0, rig.replica_id(0, "a"))
        assert rig.error("a")
        await rig.finish(0, "b")
        assert rig.answer("b") == rig.expected((2,))
        assert rig.runtime.started == []
        assert set(rig.left_over()) <= {"processor of stage 0"}, "which vLLM-Omni keeps"


async def test_switched_off_those_that_follow_are_told_too() -> None:
    async with Rig(TWO, **recovery(enabled=False)) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.kill(0, rig.replica_id(0, "a"))
        assert rig.error("a")
        assert len(rig.ends("b")) == 1 or "b" in rig.at(0)


async def test_incidents_are_counted() -> None:
    async with Rig(TWO) as rig:
        await rig.ask("a", each=[params()])
        await rig.kill(0, 0)
        facts = rig.policies.board.replicas[0, 0]
        assert (facts.restarts, facts.redispatched) == (1, 1)
        assert {"died", "restarting", "back"} <= {kind for kind, count in facts.incidents.items() if count}
