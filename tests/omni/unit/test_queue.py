"""The queue before a stage: limits, replicas, and whose work is shared."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.engine.messages import AddCompanionRequestMessage

from tests.support.omni_stages import FINAL, Rig, StageSpec, core_request, params

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

ONE_AT_A_TIME = StageSpec(final_output=True, max_num_seqs=1)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (StageSpec(final_output=True, max_num_seqs=2), {}),
        (FINAL, {"batching": {"target_latency_ms": 1000, "max_batch_size": 2}}),
        (FINAL, {"batching": {"stages": {"stage0": {"target_latency_ms": 1000, "max_batch_size": 2}}}}),
        (FINAL, {"batching": {"stages": {0: {"target_latency_ms": 1000, "max_batch_size": 2}}}}),
    ],
)
async def test_a_replica_is_given_no_more_than_its_limit(spec: StageSpec, options: dict[str, Any]) -> None:
    async with Rig(spec, **options) as rig:
        for i in range(4):
            await rig.ask(f"{i}", (i,))
        assert list(rig.at(0)) == ["0", "1"]
        await rig.finish(0, "1")
        assert list(rig.at(0)) == ["0", "2"]
        await rig.finish(0, "0", "2")
        await rig.finish(0, "3")
        assert [rig.answer(f"{i}") for i in range(4)] == [rig.expected((i,)) for i in range(4)]
        assert not rig.left_over()


async def test_one_that_is_aborted_while_it_waits_never_runs() -> None:
    async with Rig(ONE_AT_A_TIME) as rig:
        for i in range(3):
            await rig.ask(f"{i}", (i,))
        await rig.abort("1")
        await rig.finish(0, "0")
        assert list(rig.at(0)) == ["2"]
        assert rig.replica(0).took == ["0", "2"]
        await rig.finish(0, "2")
        assert not rig.left_over()


async def test_one_that_is_aborted_while_it_runs_makes_room() -> None:
    async with Rig(ONE_AT_A_TIME) as rig:
        await rig.ask("a", (1,))
        await rig.ask("b", (2,))
        await rig.abort("a")
        assert rig.replica(0).aborted == ["a"]
        assert list(rig.at(0)) == ["b"]


async def test_equal_work_runs_once_and_each_gets_its_answer_once() -> None:
    async with Rig(FINAL) as rig:
        for name in "abc":
            await rig.ask(name)
        assert rig.replica(0).took == ["a"]
        await rig.step(0, "a")
        await rig.finish(0, "a")
        assert [rig.answer(name) for name in "abc"] == [rig.expected()] * 3
        assert [one.request_id for one in rig.messages if one.type == "output"] == ["a", "b", "c"] * 2
        assert not rig.left_over()


async def test_one_that_comes_late_hears_what_was_said_before() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        await rig.step(0, "a")
        await rig.ask("b")
        await rig.finish(0, "a")
        assert rig.answer("b") == rig.expected()
        assert rig.replica(0).took == ["a"]


async def test_what_has_ended_is_nobodys_to_follow() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.ask("b")
        assert rig.replica(0).took == ["a", "b"]


async def test_a_follower_that_leaves_stops_nothing() -> None:
    async with Rig(FINAL) as rig:
        for name in "abc":
            await rig.ask(name)
        await rig.abort("b")
        assert rig.replica(0).aborted == []
        await rig.finish(0, "a")
        assert not rig.told("b")
        assert rig.answer("a") == rig.answer("c") == rig.expected()
        assert not rig.left_over()


async def test_a_leader_that_leaves_while_it_waits_hands_over() -> None:
    async with Rig(ONE_AT_A_TIME) as rig:
        await rig.ask("x", (9,))
        for name in "abc":
            await rig.ask(name)
        await rig.abort("a")
        await rig.finish(0, "x")
        assert list(rig.at(0)) == ["b"]
        await rig.finish(0, "b")
        assert rig.answer("b") == rig.answer("c") == rig.expected()
        assert not rig.left_over()


async def test_a_leader_that_leaves_while_it_runs_leaves_its_work_to_the_others() -> None:
    async with Rig(FINAL) as rig:
        for name in "abc":
            await rig.ask(name)
        await rig.step(0, "a")
        await rig.abort("a")
        assert rig.replica(0).aborted == []
        said = len(rig.told("a"))
        await rig.abort("b")
        await rig.ask("d")
        await rig.finish(0, "a")
        assert len(rig.told("a")) == said
        assert rig.answer("c") == rig.answer("d") == rig.expected()
        assert rig.replica(0).took == ["a"]
        assert not rig.left_over()


async def test_work_that_nobody_wants_any_more_is_stopped() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.abort("a")
        await rig.abort("b")
        assert rig.replica(0).aborted == ["a"]
        assert not rig.at(0)
        assert not rig.left_over()


async def test_all_of_a_group_may_leave_at_once() -> None:
    async with Rig(FINAL) as rig:
        for name in "abc":
            await rig.ask(name)
        await rig.abort("a", "b", "c")
        assert set(rig.replica(0).aborted) == {"a"}
        assert {name for name in rig.left_over() if "outlet" not in name} == set()


async def test_an_error_of_shared_work_is_everybodys() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        await rig.ask("b")
        rig.replica(0).say("a", [], error=True)
        await rig.settle()
        assert rig.error("a") == rig.error("b")
        assert not rig.left_over()


async def test_a_request_that_cannot_be_sent_fails_alone() -> None:
    async with Rig(ONE_AT_A_TIME) as rig:
        rig.replica(0).refuses = OverflowError("seed")
        await rig.ask("a")
        await rig.settle()
        assert "seed" in rig.error("a")
        rig.replica(0).refuses = None
        await rig.ask("b", (2,))
        assert list(rig.at(0)) == ["b"]
        await rig.finish(0, "b")
        assert not rig.left_over()


async def test_an_error_of_work_that_was_handed_over_is_an_error() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        await rig.ask("b")
        await rig.abort("a")
        rig.replica(0).say("a", [], error=True)
        await rig.settle()
        assert rig.error("b")


async def test_a_session_goes_past_the_queue() -> None:
    async with Rig(ONE_AT_A_TIME) as rig:
        await rig.ask("x", (9,))
        await rig.ask("s", (1,), resumable=True)
        assert list(rig.at(0)) == ["x", "s"]


def companion(request_id: str, parent_id: str) -> AddCompanionRequestMessage:
    return AddCompanionRequestMessage(
        companion_id=request_id,
        parent_id=parent_id,
        role="cfg",
        prompt=core_request(request_id, [5], params()),
        companion_prompt_text=None,
        sampling_params_list=[params()],
    )


async def test_a_companion_goes_where_its_parent_is() -> None:
    async with Rig(StageSpec(replicas=3), FINAL) as rig:
        for i in range(2):
            await rig.ask(f"{i}", (i,))
        await rig.omni._dispatch_message(companion("1+", "1"))
        assert rig.at(0)["1+"] is rig.at(0)["1"]
        await rig.finish(0, "1+")
        await rig.finish(0, "0", "1")
        await rig.finish(1, "0", "1")
        assert not rig.left_over()


async def test_a_parent_that_fails_with_its_companion_leaves_nothing() -> None:
    async with Rig(StageSpec(), FINAL) as rig:
        await rig.ask("a")
        await rig.omni._dispatch_message(companion("a+", "a"))
        await rig.abort("a+")
        assert "a+" in rig.error("a")
        assert not rig.left_over()
