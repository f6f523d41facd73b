"""vLLM-Omni's own orchestrator routes requests through stages that branch, over engines that are lists."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.engine.messages import AbortRequestMessage, ErrorMessage, OutputMessage

from tests.support.omni_stages import CUMULATIVE, DELTA, Rig, StageSpec, engine_output, params

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

ONLY_OUTPUT = {"runtime": {"branch_errors": "output"}}
PROMPT = (1, 2, 3)


def fork(replicas: int = 1, edge: bool = True) -> list[StageSpec]:
    """A thinker whose output two other stages read, one of which a third one reads."""
    return [
        StageSpec(final_output=True),
        StageSpec(replicas, final_output=True, edge=edge),
        StageSpec(replicas, edge=edge, sources=(0,)),
        StageSpec(final_output=True, edge=edge, sources=(2,)),
    ]


def diamond(replicas: int = 1, edge: bool = True) -> list[StageSpec]:
    return [
        StageSpec(),
        StageSpec(replicas, edge=edge),
        StageSpec(replicas, edge=edge, sources=(0,)),
        StageSpec(replicas, final_output=True, edge=edge, sources=(1, 2)),
    ]


def made(*path: int) -> list[int]:
    """Return what a path of stages makes of the prompt."""
    found = list(PROMPT)
    for stage_id in path:
        found = engine_output(stage_id, found)
    return found


def joined() -> list[int]:
    return engine_output(3, made(0, 1) + made(0, 2))


def outputs(rig: Rig, name: str) -> dict[int, list[int]]:
    """The last output of each stage for a request that ended once and well."""
    told = rig.told(name)
    assert not [one for one in told if isinstance(one, ErrorMessage)], told
    assert [one.finished for one in told].count(True) == 1
    assert told[-1].finished
    return {one.stage_id: list(one.engine_outputs.outputs[0].token_ids) for one in told}


def ended(rig: Rig, name: str) -> dict[int, int]:
    """Return how often each stage said that it was done with a request."""
    found: dict[int, int] = {}
    for one in rig.told(name):
        if isinstance(one, OutputMessage) and one.engine_outputs.finished:
            found[one.stage_id] = found.get(one.stage_id, 0) + 1
    return found


async def err(rig: Rig, stage_id: int) -> None:
    """Let a stage that has its input report an error for request `a`."""
    replica = rig.at(stage_id)["a"]
    assert replica.input_of("a") is not None
    replica.say("a", [], error=True)
    await rig.settle()


both = pytest.mark.parametrize("edge", [True, False], ids=["payloads", "prompts"])


@both
async def test_an_output_goes_to_all_stages_that_read_it(edge: bool) -> None:
    async with Rig(*fork(edge=edge)) as rig:
        await rig.ask("a", outputs=[0, 1, 3])
        await rig.finish(0, "a")
        assert (list(rig.at(1)), list(rig.at(2)), list(rig.at(3))) == (["a"], ["a"], [])
        await rig.finish(2, "a")
        await rig.finish(3, "a")
        await rig.finish(1, "a")
        assert outputs(rig, "a") == {0: made(0), 1: made(0, 1), 3: made(0, 2, 3)}
        assert ended(rig, "a") == {0: 1, 1: 1, 3: 1}
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


@both
async def test_a_join_waits_for_all_that_it_reads(edge: bool) -> None:
    async with Rig(*diamond(edge=edge)) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.finish(2, "a")
        assert list(rig.at(3)) == []
        await rig.finish(1, "a")
        await rig.finish(3, "a")
        assert outputs(rig, "a") == {3: joined()}
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


async def test_a_stage_that_leads_to_no_asked_output_does_not_run_and_gets_no_payload() -> None:
    async with Rig(*fork()) as rig:
        await rig.ask("a", outputs=[1])
        await rig.ask("b", outputs=[3])
        await rig.ask("c", outputs=[0])
        await rig.finish(0, "a", "b", "c")
        assert (list(rig.at(1)), list(rig.at(2))) == (["a"], ["b"])
        await rig.finish_all()
        assert outputs(rig, "a") == {0: made(0), 1: made(0, 1)}
        assert outputs(rig, "b") == {0: made(0), 3: made(0, 2, 3)}
        assert outputs(rig, "c") == {0: made(0)}
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


@pytest.mark.parametrize("starts", [True, False])
async def test_an_aborted_request_leaves_no_payload(starts: bool) -> None:
    """One that lies for a replica that may have taken it, or one that is sent after the request has left the queue."""
    async with Rig(*fork()) as rig:
        if not starts:
            for pool in rig.omni.stage_pools[1:3]:
                pool.drain(0)
            rig.replica(0).sends_late = True
        await rig.ask("a", outputs=[1, 3])
        await rig.finish(0, "a")
        assert list(rig.at(1)) == (["a"] if starts else [])
        await rig.omni._handle_abort(AbortRequestMessage(request_ids=["a"]))
        rig.replica(0).send()
        await rig.settle()
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


# ---- deaths


async def test_a_death_in_one_branch_does_not_disturb_the_other() -> None:
    """The dead replica had its input, so the thinker makes it again, and for that branch alone."""
    async with Rig(*fork(replicas=2)) as rig:
        await rig.ask("a", outputs=[1, 3])
        await rig.finish(0, "a")
        await rig.step(1, "a")
        await rig.kill(1, rig.replica_id(1, "a"))
        assert (list(rig.at(0)), list(rig.at(2))) == (["a"], ["a"])
        await rig.finish(2, "a")
        await rig.finish(0, "a")
        assert (list(rig.at(1)), list(rig.at(2))) == (["a"], [])
        await rig.finish_all()
        assert outputs(rig, "a") == {0: made(0), 1: made(0, 1), 3: made(0, 2, 3)}
        assert ended(rig, "a") == {0: 1, 1: 1, 3: 1}
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


def heard(rig: Rig, name: str, kind: Any) -> dict[int, list[int]]:
    """Return the tokens that a client has of each stage; a stream never goes back."""
    found: dict[int, list[int]] = {}
    for one in rig.told(name):
        tokens = list(one.engine_outputs.outputs[0].token_ids)
        before = found.get(one.stage_id, [])
        if kind is DELTA:
            tokens = before + tokens
        assert tokens[: len(before)] == before
        found[one.stage_id] = tokens
    return found


@pytest.mark.parametrize("chunks", [False, True], ids=["payloads", "chunks"])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA], ids=["cumulative", "delta"])
@pytest.mark.parametrize("dead", [0, 1])
async def test_equal_requests_hear_nothing_twice(dead: int, kind: Any, chunks: bool) -> None:
    stages = [
        StageSpec(2, final_output=True, chunks=chunks),
        StageSpec(2, final_output=True, edge=True, chunks=chunks),
        StageSpec(final_output=True, edge=True, sources=(0,), chunks=chunks),
    ]
    async with Rig(*stages, async_chunk=chunks) as rig:
        for name in "abc":
            await rig.ask(name, PROMPT, outputs=[0, 1, 2], each=[params(output_kind=kind) for _ in range(3)])
        await rig.step(0, "a")
        await rig.step(0, "a")
        if dead:
            await rig.finish(0, "a")
            await rig.step(1, "a")
            await rig.step(1, "a")
        before = {name: heard(rig, name, kind) for name in "abc"}
        assert [len(said[dead]) for said in before.values()] == [2, 2, 2]
        await rig.kill(dead, rig.replica_id(dead, "a"))
        for _ in range(2):
            for stage_id in range(3):
                for name in list(rig.at(stage_id)):
                    while name in rig.at(stage_id) and rig.at(stage_id)[name].input_of(name) is not None:
                        await rig.step(stage_id, name)
        for name in "abc":
            assert heard(rig, name, kind) == {0: made(0), 1: made(0, 1), 2: made(0, 2)}
            assert ended(rig, name) == {0: 1, 1: 1, 2: 1}
        assert rig.left_over() == {}


async def test_the_death_of_a_join_repeats_what_it_had_taken() -> None:
    async with Rig(*diamond(replicas=2)) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.finish(1, "a")
        await rig.finish(2, "a")
        assert rig.at(3)["a"].input_of("a") is not None
        await rig.kill(3, rig.replica_id(3, "a"))
        assert [list(rig.at(stage)) for stage in range(4)] == [["a"], [], [], []]
        for _ in range(2):
            await rig.finish_all()
        assert outputs(rig, "a") == {3: joined()}
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


async def test_an_input_of_a_join_that_still_lies_is_used_when_another_is_made_again() -> None:
    async with Rig(*diamond()) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await rig.finish(1, "a")
        rig.replica(2).sends_late = True
        await rig.finish(2, "a")
        assert list(rig.at(3)) == ["a"]
        await rig.kill(2)
        assert [list(rig.at(stage)) for stage in range(4)] == [["a"], [], [], []]
        await rig.finish(0, "a")
        assert [list(rig.at(stage)) for stage in range(4)] == [[], [], ["a"], []]
        await rig.finish_all()
        assert outputs(rig, "a") == {3: joined()}
        assert rig.replica(3).took == ["a", "a~1"]  # the withdrawn run cannot take the input of the next one
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


# ---- errors


async def test_an_error_of_one_branch_fails_the_request() -> None:
    async with Rig(*fork()) as rig:
        await rig.ask("a", outputs=[1, 3])
        await rig.finish(0, "a")
        await err(rig, 1)
        assert rig.error("a")
        assert list(rig.at(2)) == []
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


async def test_an_error_of_one_branch_fails_only_its_output_if_so_set() -> None:
    async with Rig(*fork(), **ONLY_OUTPUT) as rig:
        await rig.ask("a", outputs=[1, 3])
        await rig.finish(0, "a")
        await err(rig, 2)
        failed = rig.told("a")[-1].engine_outputs.outputs[0]
        assert (rig.told("a")[-1].stage_id, failed.finish_reason) == (3, "error")
        await rig.finish(1, "a")
        assert outputs(rig, "a") == {0: made(0), 1: made(0, 1), 3: []}
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


async def test_the_error_of_the_last_output_ends_a_request_whose_others_are_there() -> None:
    async with Rig(*fork(), **ONLY_OUTPUT) as rig:
        await rig.ask("a", outputs=[1, 3])
        await rig.finish(0, "a")
        await rig.finish(1, "a")
        await err(rig, 2)
        assert outputs(rig, "a") == {0: made(0), 1: made(0, 1), 3: []}
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


async def test_before_a_join_an_error_stops_the_other_branch() -> None:
    async with Rig(*diamond(), **ONLY_OUTPUT) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        await err(rig, 2)
        assert rig.error("a")
        assert list(rig.at(1)) == []
        assert (rig.left_over(), rig.edges.lying) == ({}, {})


async def test_streaming_input_is_refused() -> None:
    async with Rig(*fork()) as rig:
        await rig.ask("a", outputs=[1], resumable=True)
        await rig.settle()
        assert "streaming input needs stages that are a line" in rig.error("a")
        assert rig.left_over() == {}


# ---- many


async def test_many_requests_with_deaths_each_get_each_output_once() -> None:
    async with Rig(*fork(replicas=2)) as rig:
        names = [f"r{number}" for number in range(32)]
        wanted: dict[str, Any] = {}
        for number, name in enumerate(names):
            asked = [[1, 3], [1], [3], [0, 1, 3]][number % 4]
            wanted[name] = {0, *asked}
            await rig.ask(name, PROMPT, outputs=asked, each=[params() for _ in range(4)])
        await rig.settle()
        for turn in range(60):
            at = {stage: rig.at(stage) for stage in range(4)}
            if not any(at.values()):
                break
            for stage in (3, 2, 1, 0):
                for name in list(at[stage])[:4]:
                    replica = rig.at(stage).get(name)
                    if replica is not None and replica.input_of(name) is not None:
                        await rig.finish(stage, name)
            if turn in (2, 4, 6):
                await rig.kill((1, 2, 3)[turn // 2 - 1], 0)
        await rig.settle()
        for name in names:
            assert set(outputs(rig, name)) == wanted[name]
            assert ended(rig, name) == dict.fromkeys(wanted[name], 1)
        assert (rig.left_over(), rig.edges.lying) == ({}, {})
