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


@pytest.mark.parametrize(
    ("options", "took"),
    [
        ({"enabled": False}, ["a", "b", "c", "d"]),
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


NARROW = StageSpec(final_output=True, edge=True, max_num_seqs=1)


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
