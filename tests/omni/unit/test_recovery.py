"""Replicas that die: their requests run elsewhere, once, and they are started again."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import CUMULATIVE, DELTA, DIFFUSION, FINAL, FINAL_ONLY, Rig, StageSpec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

TWO = StageSpec(replicas=2, final_output=True)


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


async def test_a_request_that_is_sent_to_a_dead_replica_goes_elsewhere() -> None:
    async with Rig(TWO) as rig:
        rig.replica(0, 0).dead = True  # and nobody has noticed
        await rig.ask("a")
        await rig.settle()
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()
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


async def test_a_diffusion_stage_is_repaired_as_others_are() -> None:
    async with Rig(StageSpec(replicas=2, kind=DIFFUSION, final_output=True)) as rig:
        await rig.ask("a", params={"seed": 1})
        await rig.kill(0, rig.replica_id(0, "a"))
        await rig.finish(0, "a")
        assert len(rig.ends("a")) == 1
        assert not rig.left_over()
