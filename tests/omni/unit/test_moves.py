"""Replicas that move: they end what they have, leave, and are there elsewhere; no request notices."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_moves import MovingRig, at
from tests.support.omni_stages import StageSpec
from vllm_omni_sched.omni.stages.moves import Outcome

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

ONE, TWO = StageSpec(), StageSpec(replicas=2, final_output=True, edge=True)
LAST = StageSpec(final_output=True, edge=True)


def result(task: Any) -> Outcome:
    assert isinstance(task, asyncio.Task)
    assert task.done()
    outcome: Outcome = task.result()
    return outcome


async def through(rig: MovingRig, name: str) -> None:
    """Through all stages."""
    for stage_id in range(len(rig.stages)):
        await rig.finish(stage_id, name)


async def test_a_replica_goes_to_another_stage_with_its_device() -> None:
    async with MovingRig(ONE, TWO) as rig:
        old = rig.replica(1, 1)
        move = rig.moves.hand_over(at(1, 1), 0)
        await rig.tick()
        assert result(move) is Outcome.MOVED
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


async def test_and_back() -> None:
    async with MovingRig(ONE, TWO) as rig:
        for replica, stage_id in ((at(1, 1), 0), (at(0, 1), 1)):
            move = rig.moves.hand_over(replica, stage_id)
            await rig.tick()
            assert result(move) is Outcome.MOVED
        assert rig.live() == [[0], [0, 1]]
        assert rig.runtime.on == [(0, 1, "2"), (1, 1, "2")]


async def test_it_ends_what_it_has_and_gets_nothing_new() -> None:
    async with MovingRig(ONE, TWO) as rig:
        for name in "ab":
            await rig.ask(name, (ord(name),))
            await rig.finish(0, name)
        leaving = rig.replica_id(1, "b")
        move = rig.moves.hand_over(at(1, leaving), 0)
        for name in "cd":
            await rig.ask(name, (ord(name),))
            await rig.finish(0, name)
            assert rig.replica_id(1, name) != leaving
        await rig.tick()
        assert not move.done()
        assert rig.live() == [[0], [0, 1]]
        await rig.finish(1, "b")
        await rig.tick()
        assert result(move) is Outcome.MOVED
        await rig.finish(1, "a", "c", "d")
        for name in "abcd":
            assert rig.answer(name) == rig.expected((ord(name),))
        assert not rig.left_over()


async def test_a_replica_of_the_first_stage_waits_until_later_ones_are_through_too() -> None:
    """They may fetch from it what it sent."""
    async with MovingRig(StageSpec(replicas=2), LAST) as rig:
        await rig.ask("a")
        where = rig.replica_id(0, "a")
        move = rig.moves.hand_over(at(0, where), 1)
        await rig.finish(0, "a")
        await rig.tick()
        assert not move.done()
        await rig.finish(1, "a")
        await rig.tick()
        assert result(move) is Outcome.MOVED
        assert rig.answer("a") == rig.expected()


async def test_what_is_not_empty_in_time_stays_and_gets_work_again() -> None:
    async with MovingRig(ONE, TWO, runtime={"drain_seconds": 5.0}) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        leaving = rig.replica_id(1, "a")
        move = rig.moves.hand_over(at(1, leaving), 0)
        await rig.tick(6.0)
        await rig.tick()
        assert result(move) is Outcome.STAYED
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
        move = rig.moves.hand_over(at(1, 1), 0)
        await rig.tick()
        assert result(move) is Outcome.BACK
        assert rig.live() == [[0], [0, 1]]
        assert rig.runtime.on == [(1, 1, "2")]
        assert rig.incidents(1, 1) == {"draining": 1, "moved_away": 1, "move_failed": 1, "moved_in": 1}
        again = rig.moves.hand_over(at(1, 1), 0)
        await rig.tick()
        assert result(again) is Outcome.MOVED


async def test_what_does_not_even_go_back_is_for_recovery() -> None:
    async with MovingRig(ONE, TWO) as rig:
        rig.runtime.fails = 2
        move = rig.moves.hand_over(at(1, 1), 0)
        await rig.tick()
        assert result(move) is Outcome.LOST
        await rig.settle()
        assert rig.live() == [[0], [0, 1]]
        assert rig.runtime.on == [(1, 1, "2")]
        assert rig.incidents(1, 1)["back"] == 1


async def test_one_that_dies_before_it_is_empty_is_not_moved_and_loses_nothing() -> None:
    async with MovingRig(ONE, TWO) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        leaving = rig.replica_id(1, "a")
        move = rig.moves.hand_over(at(1, leaving), 0)
        await rig.kill(1, leaving)
        await rig.tick()
        assert result(move) is Outcome.DIED
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
        move = rig.moves.hand_over(at(1, second), 0)
        await rig.kill(1, first)
        assert rig.replica_id(1, "a") not in (first, second)
        await rig.finish(1, "a", "b")
        await rig.tick()
        assert result(move) is Outcome.MOVED


async def test_a_stop_is_no_death_even_if_it_looks_like_one() -> None:
    async with MovingRig(ONE, TWO) as rig:
        old = rig.replica(1, 1)
        rig.runtime.go.clear()
        rig.moves.hand_over(at(1, 1), 0)
        await rig.tick()
        assert old.down
        await rig.omni._handle_dead_replica(1, 1, RuntimeError("its sockets are closed"))
        assert "died" not in rig.incidents(1, 1)
        rig.runtime.go.set()
        await rig.settle()
        assert rig.live() == [[0, 1], [0]]


async def test_a_moved_replica_that_dies_is_started_where_it_was() -> None:
    async with MovingRig(ONE, TWO) as rig:
        rig.moves.hand_over(at(1, 1), 0)
        await rig.tick()
        await rig.kill(0, 1)
        assert rig.runtime.on == [(0, 1, "2"), (0, 1, "2")]
        assert rig.live() == [[0, 1], [0]]


async def test_a_stage_keeps_its_last_replica() -> None:
    async with MovingRig(ONE, TWO) as rig:
        assert rig.moves.hand_over(at(0, 0), 1) is Outcome.LAST
        assert rig.moves.give_up(at(0, 0)) is Outcome.LAST


async def test_one_move_at_a_time_and_only_of_what_is_there() -> None:
    async with MovingRig(ONE, TWO) as rig:
        assert rig.moves.hand_over(at(1, 7), 0) is Outcome.GONE
        rig.moves.hand_over(at(1, 1), 0)
        assert rig.moves.hand_over(at(1, 0), 0) is Outcome.BUSY
        await rig.tick()


async def test_a_stage_that_needs_more_devices_does_not_get_the_place() -> None:
    class Wide(MovingRig):
        widths = {0: 2}  # noqa: RUF012

    async with Wide(ONE, TWO) as rig:
        assert rig.moves.hand_over(at(1, 1), 0) is Outcome.MISFIT


async def test_other_devices_of_one_among_several() -> None:
    async with MovingRig(ONE, TWO) as rig:
        move = rig.moves.relocate(at(1, 1), "7")
        await rig.tick()
        assert result(move) is Outcome.MOVED
        assert rig.runtime.on == [(1, 1, "7")]
        assert rig.live() == [[0], [0, 1]]


async def test_the_only_one_leaves_when_another_is_there() -> None:
    async with MovingRig(ONE, LAST) as rig:
        await rig.ask("a")
        move = rig.moves.relocate(at(0, 0), "7")
        await rig.settle()
        assert rig.live() == [[0, 1], [0]]
        await rig.ask("b", (2,))
        assert rig.replica_id(0, "b") == 1
        await through(rig, "a")
        await rig.tick()
        assert result(move) is Outcome.MOVED
        assert rig.live() == [[1], [0]]
        await through(rig, "b")
        assert (rig.answer("a"), rig.answer("b")) == (rig.expected(), rig.expected((2,)))
        assert not rig.left_over()


async def test_the_only_one_stays_if_it_does_not_empty() -> None:
    async with MovingRig(ONE, LAST, runtime={"drain_seconds": 5.0}) as rig:
        await rig.ask("a")
        move = rig.moves.relocate(at(0, 0), "7")
        await rig.settle()
        await rig.tick(6.0)
        await rig.tick()
        await rig.tick()
        assert result(move) is Outcome.STAYED
        assert rig.live() == [[0], [0]]
        assert rig.moves.places.replicas(0) == [at(0, 0)]


async def test_a_spare_place_can_be_taken() -> None:
    async with MovingRig(ONE, TWO) as rig:
        assert rig.moves.take_spare(0) is Outcome.GONE
        rig.moves.give_up(at(1, 0))
        await rig.tick()
        assert rig.moves.places.spare == ["1"]
        move = rig.moves.take_spare(0)
        await rig.settle()
        assert result(move) is Outcome.MOVED
        assert rig.runtime.on == [(0, 1, "1")]
        assert rig.moves.places.spare == []


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
        rig.moves.hand_over(at(1, 1), 0)
        await rig.tick()
        assert len(cleared) == (stage_id == 0)
        rig.moves.hand_over(at(0, 1), 1)
        await rig.tick()
        assert len(cleared) == 1
        await rig.kill(stage_id, 0)
        assert len(cleared) == 2


async def test_without_recovery_moves_are_told_too() -> None:
    async with MovingRig(ONE, TWO, runtime={"recovery": {"enabled": False}}) as rig:
        move = rig.moves.hand_over(at(1, 1), 0)
        await rig.tick()
        assert result(move) is Outcome.MOVED
        assert rig.incidents(1, 1) == {"draining": 1, "moved_away": 1}
        assert rig.incidents(0, 1) == {"moved_in": 1}


async def test_it_stays_when_the_other_one_dies_before_it_has_left() -> None:
    async with MovingRig(ONE, TWO) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        leaving = rig.replica_id(1, "a")
        move = rig.moves.hand_over(at(1, leaving), 0)
        await rig.turn()
        rig.runtime.go.clear()
        await rig.kill(1, 1 - leaving)
        await rig.finish(1, "a")
        await rig.tick()
        assert result(move) is Outcome.STAYED
        assert rig.live() == [[0], [leaving]]
        rig.runtime.go.set()


async def test_one_that_hangs_is_not_counted_on() -> None:
    async with MovingRig(ONE, TWO) as rig:
        rig.omni.stage_pools[1].suspected.add(0)
        assert rig.moves.hand_over(at(1, 1), 0) is Outcome.LAST


async def test_what_was_kept_goes_on_when_a_replica_moves_in() -> None:
    async with MovingRig(StageSpec(replicas=2), LAST) as rig:
        rig.runtime.fails = 100
        await rig.kill(1, 0)
        await rig.ask("a")
        await rig.finish(0, "a")
        assert rig.live()[1] == []
        rig.runtime.fails = 0
        move = rig.moves.hand_over(at(0, 1), 1)
        await rig.tick()
        await rig.tick()
        assert result(move) is Outcome.MOVED
        await rig.finish(1, "a")
        assert rig.answer("a") == rig.expected()
