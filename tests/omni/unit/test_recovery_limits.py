"""How much recovery tries, and what fails then."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL, Rig, StageSpec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

TWO = StageSpec(replicas=2, final_output=True)


def recovery(**how: Any) -> dict[str, Any]:
    return {"runtime": {"recovery": how}}


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
        await rig.ask("b")
        await rig.settle()
        for name in "ab":
            assert "Stage-0: it has no live replica: replica 0 died" in rig.error(name)
            assert "runtime.recovery.restart is off" in rig.error(name)
        assert not rig.left_over()


async def test_after_a_crash_loop_requests_are_told_why_until_when_and_which_option_says_so() -> None:
    async with Rig(FINAL, **recovery(max_restarts=2, window_seconds=100.0)) as rig:
        for _ in range(3):
            await rig.kill(0)
            await rig.tick(10.0)
        await rig.ask("a")
        await rig.settle()
        said = rig.error("a")
        assert said.startswith("Stage-0: it has no live replica: replica 0 died (EngineCore encountered an issue")
        assert "after 2 restarts in the last 30 s; it is restarted in 70 s" in said
        assert "runtime.recovery.max_restarts allows 2 in 100 s (window_seconds)" in said
        await rig.tick(70.0)
        await rig.ask("b")
        await rig.finish(0, "b")
        assert rig.answer("b") == rig.expected()
        assert not rig.left_over()


async def test_one_that_waited_too_long_fails() -> None:
    async with Rig(FINAL, **recovery(max_wait_seconds=5.0)) as rig:
        await rig.ask("a")
        rig.runtime.go.clear()
        await rig.kill(0)
        await rig.tick(4.0)
        assert not rig.told("a")
        await rig.tick(2.0)
        assert "max_wait_seconds" in rig.error("a")
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


async def test_what_was_kept_waits_no_longer_than_it_may() -> None:
    async with Rig(StageSpec(), StageSpec(final_output=True), runtime={"recovery": {"max_wait_seconds": 60.0}}) as rig:
        rig.runtime.go.clear()
        await rig.kill(1, 0)
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.tick(0.0)
        await rig.tick(30.0)
        assert not rig.ends("a")
        await rig.tick(40.0)
        assert "max_wait_seconds" in rig.error("a")
        rig.runtime.go.set()


async def test_a_start_that_takes_long_is_not_begun_twice() -> None:
    async with Rig(StageSpec(final_output=True)) as rig:
        rig.runtime.go.clear()
        await rig.kill(0, 0)
        await rig.tick(1000.0)
        await rig.tick(1000.0)
        assert rig.runtime.starting == 1
        rig.runtime.go.set()
        await rig.settle()
        assert rig.runtime.started == [(0, 0)]
