"""Who goes when, and where to, in a stage of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL, GENERATION, Rig, StageSpec, of
from vllm_omni_sched.graph.waiting_queue import WaitingQueue

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

ONE_AT_A_TIME = StageSpec(final_output=True, max_num_seqs=1)


async def order(rig: Rig, *names: str) -> list[str]:
    """In which order they run, one after the other; each of the class that its first letter stands for."""
    classes = {"r": "realtime", "i": "interactive", "b": "batch"}
    await rig.ask("x", (0,))
    for i, name in enumerate(names):
        await rig.ask(name, (i + 1,), params=of(classes[name[0]]))
    for _ in range(len(names) + 1):
        await rig.finish(0, *rig.at(0))
    assert not rig.left_over()
    return rig.replica(0).took[1:]


async def test_the_better_class_goes_first() -> None:
    async with Rig(ONE_AT_A_TIME, graph={"priority": {"min_low_share": 0.0}}) as rig:
        assert await order(rig, "b1", "i1", "r1", "b2", "r2") == ["r1", "r2", "i1", "b1", "b2"]


async def test_the_priority_of_a_request_goes_along_to_later_stages() -> None:
    async with Rig(StageSpec(), FINAL) as rig:
        await rig.ask("a", priority=3)
        await rig.finish(0, "a")
        assert rig.replica(1).requests["a"].priority == 3


@pytest.mark.parametrize(("capacity", "took"), [(1, ["a"]), (2, ["a", "b"]), (3, ["a", "b", "c"])])
async def test_a_stage_starts_only_what_the_next_one_has_room_for(capacity: int, took: list[str]) -> None:
    async with Rig(StageSpec(), ONE_AT_A_TIME, runtime={"credits": {"enabled": True, "capacity": capacity}}) as rig:
        for name in "abc":
            await rig.ask(name, (ord(name),))
        assert rig.replica(0).took == took
        await rig.finish(0, *took)
        assert rig.replica(0).took == took, "they are in the next stage now"
        await rig.finish(1, "a")
        assert rig.replica(0).took == [*"abc"][: capacity + 1]
        for _ in range(3):
            for stage_id in (0, 1):
                await rig.finish(stage_id, *rig.at(stage_id))
        for name in "abc":
            assert rig.answer(name) == rig.expected((ord(name),))
        assert not rig.left_over()


async def test_a_stage_that_runs_whole_batches_waits_for_more_but_not_for_long() -> None:
    batches = StageSpec(final_output=True, kind=GENERATION, max_num_seqs=3)
    async with Rig(batches, batching={"hold_ms": 50.0}) as rig:
        await rig.ask("a", (1,))
        assert list(rig.at(0)) == ["a"], "it was idle"
        await rig.ask("b", (2,))
        assert list(rig.at(0)) == ["a"]
        await rig.tick(0.06)
        assert list(rig.at(0)) == ["a", "b"]


async def test_and_goes_when_its_batch_is_full() -> None:
    batches = StageSpec(final_output=True, kind=GENERATION, max_num_seqs=3)
    async with Rig(batches, batching={"hold_ms": 50.0}) as rig:
        for i in range(3):
            await rig.ask(f"{i}", (i,))
        assert list(rig.at(0)) == ["0", "1", "2"]


async def test_what_happens_is_on_the_board() -> None:
    async with Rig(FINAL) as rig:
        for name in "abc":
            await rig.ask(name)
        await rig.ask("d", (9,))
        await rig.finish(0, "a")
        await rig.abort("d")
        board = rig.driver.board
        assert board.stages[0].merged == 2
        facts = board.replicas[0, 0]
        assert (facts.ended["finished"], facts.ended["aborted"], facts.running) == (1, 1, 0)


async def test_a_page_of_metrics_is_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        publisher = type(rig.driver).publish(rig.driver)
        try:
            pages = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
            assert any("omni_sched_stage" in page for page in pages)
        finally:
            publisher.close()


async def test_a_place_that_is_about_to_be_free_is_filled() -> None:
    async with Rig(ONE_AT_A_TIME) as rig:
        for i in range(12):  # a second for 100 tokens
            await rig.ask(f"{i}", (i,), params={"max_tokens": 100})
            rig.now += 1.0
            await rig.finish(0, f"{i}")
        for name in "abc":
            await rig.ask(name, (ord(name),), params={"max_tokens": 100})
        assert list(rig.at(0)) == ["a"]
        rig.now += 0.9
        await rig.omni.release()
        assert list(rig.at(0)) == ["a"]
        rig.now += 0.07
        await rig.omni.release()
        assert list(rig.at(0)) == ["a", "b"], "it is there when a ends"
        rig.now += 0.5
        await rig.omni.release()
        assert list(rig.at(0)) == ["a", "b"], "nobody knows when a ends that takes longer than it should"


async def test_nobody_who_waits_is_looked_at_while_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(ONE_AT_A_TIME) as rig:
        await rig.ask("x", (0,), params={"max_tokens": 1000})
        rig.now += 60.0
        looks: list[float] = []
        head = WaitingQueue.head
        monkeypatch.setattr(WaitingQueue, "head", lambda queue, now: (looks.append(now), head(queue, now))[1])
        for i in range(20):
            await rig.ask(f"{i}", (i + 1,))
            await rig.omni.release()
        assert looks == []
        await rig.finish(0, "x")
        assert 0 < len(looks) < 10, "the first of a lane or two"
