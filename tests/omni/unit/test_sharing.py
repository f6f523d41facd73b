"""Work that is shared over stages, and requests that part after one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import DELTA, FINAL, FINAL_ONLY, Rig, StageSpec, params

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

FIRST = StageSpec()
SECOND = StageSpec(final_output=True, edge=True)


def parted(length: int) -> list[Any]:
    """Parameters that are the same in the first stage, and not in the second."""
    return [params(), params(max_tokens=length)]


async def test_equal_requests_share_all_stages() -> None:
    async with Rig(FIRST, SECOND) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.finish(0, "a")
        assert (rig.replica(0).took, rig.replica(1).took) == (["a"], ["a"])
        await rig.finish(1, "a")
        assert rig.answer("a") == rig.answer("b") == rig.expected()
        assert not rig.left_over()
        assert not rig.edges.lying


async def test_requests_that_part_get_a_payload_each() -> None:
    async with Rig(FIRST, SECOND) as rig:
        await rig.ask("a", each=parted(5))
        await rig.ask("b", each=parted(6))
        await rig.ask("c", each=parted(6))
        assert rig.replica(0).took == ["a"]
        await rig.finish(0, "a")
        assert sorted(rig.replica(1).took) == ["a", "b"]
        await rig.finish(1, "b", "a")
        assert [rig.answer(name) for name in "abc"] == [rig.expected()] * 3
        assert not rig.left_over()
        assert not rig.edges.lying


async def test_they_do_so_where_no_payload_is_sent() -> None:
    async with Rig(FIRST, FINAL) as rig:
        await rig.ask("a", each=parted(5))
        await rig.ask("b", each=parted(6))
        await rig.finish(0, "a")
        assert rig.replica(1).took == ["a", "b"]
        await rig.finish(1, "a", "b")
        assert rig.answer("a") == rig.answer("b") == rig.expected()


async def test_a_payload_goes_to_those_that_are_left() -> None:
    async with Rig(FIRST, SECOND) as rig:
        await rig.ask("a")
        await rig.ask("b", each=parted(6))
        await rig.ask("c", each=parted(7))
        await rig.abort("a")
        await rig.finish(0, "a")
        assert sorted(rig.replica(1).took) == ["b", "c"]
        await rig.finish(1, "b", "c")
        assert rig.answer("b") == rig.answer("c") == rig.expected()
        assert not rig.left_over()
        assert not rig.edges.lying


async def test_one_that_parts_and_draws_runs_alone() -> None:
    drawn = [params(), params(temperature=1.0)]
    async with Rig(FIRST, SECOND) as rig:
        for name in "ab":
            await rig.ask(name, each=drawn)
        await rig.finish(0, "a")
        assert rig.replica(1).took == ["a", "b"]
        await rig.finish(1, "a", "b")
        assert not rig.left_over()


async def test_one_that_ends_earlier_is_not_sent_on() -> None:
    """Where a request ends is part of its key."""
    async with Rig(StageSpec(final_output=True), SECOND) as rig:
        await rig.ask("a")
        await rig.ask("b", stages=1)
        assert rig.replica(0).took == ["a", "b"]
        await rig.finish(0, "a", "b")
        assert rig.answer("b") == rig.expected(stages=1)
        assert rig.replica(1).took == ["a"]


async def test_who_comes_while_the_second_stage_runs_does_the_first_again_and_joins_there() -> None:
    async with Rig(FIRST, SECOND) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.ask("b")
        await rig.finish(0, "b")
        assert (rig.replica(0).took, rig.replica(1).took) == (["a", "b"], ["a"])
        await rig.finish(1, "a")
        assert rig.answer("a") == rig.answer("b") == rig.expected()
        assert not rig.left_over()


async def test_one_may_run_by_itself_follow_and_run_by_itself_again() -> None:
    async with Rig(FIRST, StageSpec(edge=True), SECOND) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.ask("b", each=[params(), params(), params(max_tokens=5)])
        await rig.finish(0, "b")
        await rig.finish(1, "a")
        await rig.finish(2, *rig.at(2))
        assert rig.answer("a") == rig.answer("b") == rig.expected()


async def test_a_payload_that_nobody_will_get_does_not_lie_there_for_ever() -> None:
    async with Rig(FIRST, SECOND) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.ask("b")
        await rig.finish(0, "b")
        await rig.finish(1, "a")
        assert rig.answer("b") == rig.expected()
        assert not rig.edges.lying
        assert not rig.left_over()


async def test_nor_that_of_one_that_joins_later_and_leaves() -> None:
    async with Rig(FIRST, SECOND) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.ask("b")
        await rig.finish(0, "b")
        await rig.abort("b")
        await rig.finish(1, "a")
        assert not rig.edges.lying
        assert not rig.left_over()


async def test_nobody_waits_for_the_payload_of_work_that_failed() -> None:
    async with Rig(FIRST, SECOND) as rig:
        await rig.ask("a", each=parted(5))
        await rig.ask("b", each=parted(6))
        rig.replica(0).say("a", [], error=True)
        await rig.turn()
        assert not rig.omni.stage_pools[1].queue.stage.held
        await rig.settle()
        assert not rig.left_over()


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
async def test_who_comes_before_anything_was_said_joins(kind: Any) -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a", params={"output_kind": kind})
        await rig.ask("b", params={"output_kind": kind})
        assert rig.replica(0).took == ["a"]
        await rig.step(0, "a")
        await rig.finish(0, "a")
        assert rig.heard("a") == rig.heard("b") == rig.expected()


async def test_who_gets_only_what_is_new_does_not_join_late() -> None:
    async with Rig(FINAL) as rig:
        for name in "abc":
            if name == "b":
                await rig.step(0, "a")
            await rig.ask(name, params={"output_kind": DELTA})
        assert rig.replica(0).took == ["a", "b"]
        await rig.finish(0, "a", "b")
        assert [rig.heard(name) for name in "abc"] == [rig.expected()] * 3
        assert not rig.left_over()


async def test_nor_when_the_work_was_handed_over() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a", params={"output_kind": DELTA})
        await rig.ask("b", params={"output_kind": DELTA})
        await rig.abort("a")
        await rig.step(0, "a")
        await rig.ask("c", params={"output_kind": DELTA})
        for name in list(rig.at(0)):
            await rig.finish(0, name)
        assert rig.heard("b") == rig.heard("c") == rig.expected()


@pytest.mark.parametrize(
    ("options", "took"),
    [
        ({"enabled": False}, ["a", "b", "c", "d"]),
        ({"max_followers": 1}, ["a", "c"]),
        ({}, ["a"]),
    ],
)
async def test_options_of_merging(options: dict[str, Any], took: list[str]) -> None:
    async with Rig(FINAL, graph={"merging": options}) as rig:
        for name in "abcd":
            await rig.ask(name)
        assert rig.replica(0).took == took
        await rig.finish(0, *took)
        assert [rig.answer(name) for name in "abcd"] == [rig.expected()] * 4
        assert not rig.left_over()


async def test_how_urgent_a_request_is_does_not_part_it_from_others() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a", params={"extra_args": {"omni_class": "batch"}})
        await rig.ask("b", params={"extra_args": {"omni_class": "realtime"}})
        assert rig.replica(0).took == ["a"]


async def test_with_async_chunks_who_shares_one_stage_shares_all() -> None:
    async with Rig(FIRST, FINAL, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.ask("c", each=parted(5))
        assert rig.replica(0).took == rig.replica(1).took == ["a", "c"]
        await rig.finish(0, "a", "c")
        await rig.finish(1, "a", "c")
        assert rig.answer("a") == rig.answer("b") == rig.answer("c")
        assert not rig.left_over()


async def test_with_async_chunks_nobody_joins_after_a_stage_has_ended() -> None:
    async with Rig(FIRST, FINAL, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.ask("b")
        assert rig.replica(0).took == rig.replica(1).took == ["a", "b"]
        await rig.ask("c")
        assert rig.replica(0).took == ["a", "b"], "a later one may join the second run"
        await rig.finish(0, "b")
        await rig.finish(1, "a", "b")
        assert rig.answer("a") == rig.answer("b") == rig.answer("c")
        assert not rig.left_over()


async def test_with_async_chunks_an_abort_reaches_all_stages() -> None:
    async with Rig(FIRST, FINAL, async_chunk=True) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.abort("a")
        assert rig.replica(0).aborted == rig.replica(1).aborted == []
        await rig.abort("b")
        assert rig.replica(0).aborted == rig.replica(1).aborted == ["a"]
        assert not rig.left_over()


NARROW = StageSpec(final_output=True, edge=True, max_num_seqs=1)


async def test_who_leads_in_the_place_of_one_that_waits_in_a_later_stage_gets_its_payload() -> None:
    async with Rig(StageSpec(), NARROW) as rig:
        await rig.ask("x", (9,))
        await rig.finish(0, "x")
        await rig.ask("a")
        await rig.ask("b")
        await rig.finish(0, "a")
        await rig.abort("a")
        await rig.finish(1, "x")
        await rig.finish(1, "b")
        assert rig.answer("b") == rig.expected()
        assert not rig.left_over()
        assert not rig.edges.lying


async def test_the_payload_of_one_that_leaves_while_it_waits_is_taken_back() -> None:
    async with Rig(StageSpec(), NARROW) as rig:
        await rig.ask("x", (9,))
        await rig.finish(0, "x")
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.abort("a")
        await rig.finish(1, "x")
        assert not rig.left_over()
        assert not rig.edges.lying
