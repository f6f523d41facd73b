"""Replicas that move: they end what they have, leave, and are there elsewhere; no request notices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_moves import MovingRig, at, result
from tests.support.omni_stages import StageSpec
from vllm_omni_sched.omni.stages.placement.replica_migrator import MigrationOutcome

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

ONE, TWO = StageSpec(), StageSpec(replicas=2, final_output=True, edge=True)
LAST = StageSpec(final_output=True, edge=True)


async def through(rig: MovingRig, name: str) -> None:
    """Through all stages."""
    for stage_id in range(len(rig.stages)):
        await rig.finish(stage_id, name)


async def test_a_replica_goes_to_another_stage_with_its_device() -> None:
    async with MovingRig(ONE, TWO) as rig:
        old = rig.replica(1, 1)
        assert await rig.hand_over(at(1, 1), 0) is MigrationOutcome.MOVED
        assert old.down
        assert rig.live() == [[0, 1], [0]]
        assert rig.runtime.on == [(0, 1, "2")]
        for name in "ab":
            await rig.ask(name, (ord(name),))
        assert {rig.replica_id(0, name) for name in "ab"} == {0, 1}
        for name in "ab":
            await through(rig, name)
            assert rig.answer(name) == rig.expected((ord(name),))
        assert rig.incidents(1, 1) == {"draining": 1, "moved_away": 1}
        assert rig.incidents(0, 1) == {"moved_in": 1}
        assert not rig.left_over()


async def test_it_ends_what_it_has_and_gets_nothing_new() -> None:
    async with MovingRig(ONE, TWO) as rig:
        for name in "ab":
            await rig.ask(name, (ord(name),))
            await rig.finish(0, name)
        leaving = rig.replica_id(1, "b")
        move = rig.migrator.hand_over(at(1, leaving), 0)
        for name in "cd":
            await rig.ask(name, (ord(name),))
            await rig.finish(0, name)
            assert rig.replica_id(1, name) != leaving
        await rig.tick()
        assert not move.done()
        assert rig.live() == [[0], [0, 1]]
        await rig.finish(1, "b")
        await rig.tick()
        assert result(move) is MigrationOutcome.MOVED
        await rig.finish(1, "a", "c", "d")
        for name in "abcd":
            assert rig.answer(name) == rig.expected((ord(name),))
        assert not rig.left_over()


async def test_a_replica_of_the_first_stage_waits_until_later_ones_are_through_too() -> None:
    """They may fetch from it what it sent."""
    async with MovingRig(StageSpec(replicas=2), LAST) as rig:
        await rig.ask("a")
        where = rig.replica_id(0, "a")
        move = rig.migrator.hand_over(at(0, where), 1)
        await rig.finish(0, "a")
        await rig.tick()
        assert not move.done()
        await rig.finish(1, "a")
        await rig.tick()
        assert result(move) is MigrationOutcome.MOVED
        assert rig.answer("a") == rig.expected()


async def test_a_stage_keeps_its_last_replica() -> None:
    async with MovingRig(ONE, TWO) as rig:
        assert rig.migrator.hand_over(at(0, 0), 1) is MigrationOutcome.LAST
        assert rig.migrator.give_up(at(0, 0)) is MigrationOutcome.LAST


async def test_the_only_one_leaves_when_another_is_there() -> None:
    async with MovingRig(ONE, LAST) as rig:
        await rig.ask("a")
        move = rig.migrator.relocate(at(0, 0), "7")
        await rig.settle()
        assert rig.live() == [[0, 1], [0]]
        await rig.ask("b", (2,))
        assert rig.replica_id(0, "b") == 1
        await through(rig, "a")
        await rig.tick()
        assert result(move) is MigrationOutcome.MOVED
        assert rig.live() == [[1], [0]]
        await through(rig, "b")
        assert (rig.answer("a"), rig.answer("b")) == (rig.expected(), rig.expected((2,)))
        assert not rig.left_over()


@pytest.mark.parametrize("stage_id", [0, 1])
async def test_senders_of_items_forget_what_an_old_replica_had(stage_id: int) -> None:
    cleared: list[int] = []

    class Renderer:
        async def clear_mm_cache_async(self) -> None:
            cleared.append(stage_id)

    async with MovingRig(ONE, TWO) as rig:
        processor = SimpleNamespace(renderer=Renderer())
        if stage_id == 0:
            rig.omni.first_input_processor = processor
        else:
            rig.omni._stage_input_processors[1] = processor
        rig.migrator.hand_over(at(1, 1), 0)
        await rig.tick()
        assert len(cleared) == (stage_id == 0)
        rig.migrator.hand_over(at(0, 1), 1)
        await rig.tick()
        assert len(cleared) == 1
        await rig.kill(stage_id, 0)
        assert len(cleared) == 2


async def test_without_recovery_moves_are_told_too() -> None:
    async with MovingRig(ONE, TWO, runtime={"recovery": {"enabled": False}}) as rig:
        assert await rig.hand_over(at(1, 1), 0) is MigrationOutcome.MOVED
        assert rig.incidents(1, 1) == {"draining": 1, "moved_away": 1}
        assert rig.incidents(0, 1) == {"moved_in": 1}
