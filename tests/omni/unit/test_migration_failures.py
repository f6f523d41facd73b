"""Moves that do not go through: what stays, goes back or dies, and no request notices."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_moves import MovingRig, at, result
from tests.support.omni_stages import StageSpec
from vllm_omni_sched.omni.stages.placement.replica_migrator import MigrationOutcome

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

ONE, TWO = StageSpec(), StageSpec(replicas=2, final_output=True, edge=True)
LAST = StageSpec(final_output=True, edge=True)


async def test_what_is_not_empty_in_time_stays_and_gets_work_again() -> None:
    async with MovingRig(ONE, TWO, runtime={"drain_seconds": 5.0}) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        leaving = rig.replica_id(1, "a")
        move = rig.migrator.hand_over(at(1, leaving), 0)
        await rig.tick(6.0)
        await rig.tick()
        assert result(move) is MigrationOutcome.STAYED
        assert rig.live() == [[0], [0, 1]]
        assert rig.incidents(1, leaving) == {"draining": 1, "stayed": 1}
        await rig.finish(1, "a")
        names = "bcde"
        for name in names:
            await rig.ask(name, (ord(name),))
            await rig.finish(0, name)
        assert {rig.replica_id(1, name) for name in names} == {0, 1}


async def test_what_does_not_start_goes_back() -> None:
    async with MovingRig(ONE, TWO) as rig:
        rig.runtime.fails = 1
        assert await rig.hand_over(at(1, 1), 0) is MigrationOutcome.BACK
        assert rig.live() == [[0], [0, 1]]
        assert rig.runtime.on == [(1, 1, "2")]
        assert rig.incidents(1, 1) == {"draining": 1, "moved_away": 1, "move_failed": 1, "moved_in": 1}
        assert await rig.hand_over(at(1, 1), 0) is MigrationOutcome.MOVED


async def test_one_that_dies_before_it_is_empty_is_not_moved_and_loses_nothing() -> None:
    async with MovingRig(ONE, TWO) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        leaving = rig.replica_id(1, "a")
        move = rig.migrator.hand_over(at(1, leaving), 0)
        await rig.kill(1, leaving)
        await rig.tick()
        assert result(move) is MigrationOutcome.DIED
        assert rig.live() == [[0], [0, 1]]
        await through_last(rig, "a")
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()


async def through_last(rig: MovingRig, name: str) -> None:
    if name in rig.at(0):  # its payload was got by the one that died
        await rig.finish(0, name)
    await rig.finish(1, name)


async def test_a_request_of_a_dead_replica_does_not_go_to_one_that_leaves() -> None:
    async with MovingRig(ONE, StageSpec(replicas=3, final_output=True)) as rig:
        for name in "ab":
            await rig.ask(name, (ord(name),))
            await rig.finish(0, name)
        first, second = rig.replica_id(1, "a"), rig.replica_id(1, "b")
        move = rig.migrator.hand_over(at(1, second), 0)
        await rig.kill(1, first)
        assert rig.replica_id(1, "a") not in (first, second)
        await rig.finish(1, "a", "b")
        await rig.tick()
        assert result(move) is MigrationOutcome.MOVED


async def test_a_stop_is_no_death_even_if_it_looks_like_one() -> None:
    async with MovingRig(ONE, TWO) as rig:
        old = rig.replica(1, 1)
        rig.runtime.go.clear()
        rig.migrator.hand_over(at(1, 1), 0)
        await rig.tick()
        assert old.down
        await rig.omni._handle_dead_replica(1, 1, RuntimeError("its sockets are closed"))
        assert "died" not in rig.incidents(1, 1)
        rig.runtime.go.set()
        await rig.settle()
        assert rig.live() == [[0, 1], [0]]


async def test_a_moved_replica_that_dies_is_started_where_it_was() -> None:
    async with MovingRig(ONE, TWO) as rig:
        rig.migrator.hand_over(at(1, 1), 0)
        await rig.tick()
        await rig.kill(0, 1)
        assert rig.runtime.on == [(0, 1, "2"), (0, 1, "2")]
        assert rig.live() == [[0, 1], [0]]


async def test_what_was_kept_goes_on_when_a_replica_moves_in() -> None:
    async with MovingRig(StageSpec(replicas=2), LAST) as rig:
        rig.runtime.fails = 100
        await rig.kill(1, 0)
        await rig.ask("a")
        await rig.finish(0, "a")
        assert rig.live()[1] == []
        rig.runtime.fails = 0
        move = rig.migrator.hand_over(at(0, 1), 1)
        await rig.tick()
        await rig.tick()
        assert result(move) is MigrationOutcome.MOVED
        await rig.finish(1, "a")
        assert rig.answer("a") == rig.expected()
