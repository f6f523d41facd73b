"""Requests with equal inputs share the work of stages that branch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.engine.messages import ErrorMessage

from tests.support.omni_stages import Rig, StageSpec, engine_output, params
from tests.support.omni_stages import StageSpec as Spec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

PROMPT = (1, 2, 3)


def fork(replicas: int = 1, chunks: bool = False, **thinker: Any) -> list[StageSpec]:
    """A thinker that a talker and an echo read by connector, and a painter by prompt; the vocoder reads the echo."""
    return [
        Spec(replicas, final_output=True, chunks=chunks, **thinker),
        Spec(replicas, final_output=True, edge=True, chunks=chunks),
        Spec(replicas, edge=True, chunks=chunks, sources=(0,)),
        Spec(replicas, final_output=True, edge=True, chunks=chunks, sources=(2,)),
        Spec(replicas, final_output=True, sources=(0,)),
    ]


ALL = [0, 1, 3, 4]
PATHS = {0: (0,), 1: (0, 1), 3: (0, 2, 3), 4: (0, 4)}


def diamond(replicas: int = 1, chunks: bool = False) -> list[StageSpec]:
    return [
        Spec(replicas, chunks=chunks),
        Spec(replicas, edge=True, chunks=chunks),
        Spec(replicas, edge=True, chunks=chunks, sources=(0,)),
        Spec(replicas, final_output=True, edge=True, chunks=chunks, sources=(1, 2)),
    ]


def made(*path: int) -> list[int]:
    found = list(PROMPT)
    for stage_id in path:
        found = engine_output(stage_id, found)
    return found


def outputs(rig: Rig, name: str) -> dict[int, list[int]]:
    told = rig.told(name)
    assert not [one for one in told if isinstance(one, ErrorMessage)], told
    assert [one.finished for one in told].count(True) == 1
    return {one.stage_id: list(one.engine_outputs.outputs[0].token_ids) for one in told}


def took(rig: Rig) -> list[list[str]]:
    """Return what the replicas of each stage were sent."""
    return [[name for one in pool.clients if one is not None for name in one.took] for pool in rig.omni.stage_pools]


def engines(rig: Rig) -> list[list[str]]:
    return [list(rig.at(stage)) for stage in range(len(rig.stages))]


def nothing_left(rig: Rig) -> None:
    assert (rig.left_over(), rig.edges.lying) == ({}, {})


both = pytest.mark.parametrize("chunks", [False, True], ids=["payloads", "chunks"])


@both
async def test_equal_requests_run_once_in_every_stage(chunks: bool) -> None:
    async with Rig(*fork(chunks=chunks), async_chunk=chunks) as rig:
        for name in "abc":
            await rig.ask(name, outputs=ALL)
        for _ in range(3):
            await rig.finish_all()
        assert took(rig) == [["a"]] * 5
        for name in "abc":
            assert outputs(rig, name) == {stage: made(*path) for stage, path in PATHS.items()}
        nothing_left(rig)


@both
async def test_equal_requests_run_once_before_and_in_a_join(chunks: bool) -> None:
    async with Rig(*diamond(chunks=chunks), async_chunk=chunks) as rig:
        for name in "ab":
            await rig.ask(name)
        for _ in range(2):
            await rig.finish_all()
        assert took(rig) == [["a"]] * 4
        for name in "ab":
            assert outputs(rig, name) == {3: engine_output(3, made(0, 1) + made(0, 2))}
        nothing_left(rig)


@both
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
async def test_requests_that_would_part_where_a_payload_is_read_share_nothing(stage: int, chunks: bool) -> None:
    async with Rig(*fork(chunks=chunks), async_chunk=chunks) as rig:
        for number, name in enumerate("ab"):
            each = [params(max_tokens=16 + number * (one == stage)) for one in range(5)]
            await rig.ask(name, outputs=[0, 1, 3], each=each)
        for _ in range(3):
            await rig.finish_all()
        assert took(rig)[:4] == [["a", "b"]] * 4
        for name in "ab":
            assert outputs(rig, name) == {one: made(*PATHS[one]) for one in (0, 1, 3)}
        nothing_left(rig)


async def test_requests_that_ask_for_other_outputs_share_nothing() -> None:
    async with Rig(*fork()) as rig:
        await rig.ask("a", outputs=[0, 1])
        await rig.ask("b", outputs=[0, 3])
        for _ in range(3):
            await rig.finish_all()
        assert took(rig) == [["a", "b"], ["a"], ["b"], ["b"], []]
        nothing_left(rig)


# ---- requests that leave


@both
@pytest.mark.parametrize("stages", [0, 1, 2, 3])
async def test_work_goes_on_for_others_when_the_request_leaves_that_it_was_begun_for(stages: int, chunks: bool) -> None:
    """``stages``: those that have ended before."""
    async with Rig(*diamond(chunks=chunks), async_chunk=chunks) as rig:
        for name in "abc":
            await rig.ask(name)
        for stage in range(stages):
            await rig.finish_all() if not chunks else await rig.finish(stage, "a")
        await rig.abort("a")
        for _ in range(4):
            for stage in range(4):
                for name in list(rig.at(stage)):
                    if rig.at(stage)[name].input_of(name) is not None:
                        await rig.finish(stage, name)
        for name in "bc":
            assert outputs(rig, name) == {3: engine_output(3, made(0, 1) + made(0, 2))}
        nothing_left(rig)


@both
async def test_when_all_leave_nothing_goes_on(chunks: bool) -> None:
    async with Rig(*diamond(chunks=chunks), async_chunk=chunks) as rig:
        for name in "ab":
            await rig.ask(name)
        await rig.finish(0, "a")
        await rig.abort("a")
        await rig.abort("b")
        assert engines(rig) == [[]] * 4
        nothing_left(rig)


# ---- deaths


@both
@pytest.mark.parametrize("dead", [0, 1, 2, 3])
async def test_requests_that_share_work_are_answered_after_a_death(dead: int, chunks: bool) -> None:
    async with Rig(*diamond(replicas=2, chunks=chunks), async_chunk=chunks) as rig:
        for name in "abc":
            await rig.ask(name)
        for stage in range(dead):
            if "a" in rig.at(stage):
                await rig.finish(stage, "a")
        assert rig.at(dead)["a"].input_of("a") is not None
        await rig.kill(dead, rig.replica_id(dead, "a"))
        await run_to_the_end(rig)
        for name in "abc":
            assert outputs(rig, name) == {3: engine_output(3, made(0, 1) + made(0, 2))}
        nothing_left(rig)


async def test_a_death_before_a_payload_was_sent_makes_it_again_for_all() -> None:
    async with Rig(*diamond()) as rig:
        for name in "ab":
            await rig.ask(name)
        rig.replica(0).sends_late = True
        await rig.finish(0, "a")
        await rig.kill(0)
        await run_to_the_end(rig)
        for name in "ab":
            assert outputs(rig, name) == {3: engine_output(3, made(0, 1) + made(0, 2))}
        nothing_left(rig)


async def run_to_the_end(rig: Rig) -> None:
    for _ in range(12):
        for stage in range(len(rig.stages)):
            for name in list(rig.at(stage)):
                replica = rig.at(stage).get(name)
                if replica is not None and replica.input_of(name) is not None:
                    await rig.finish(stage, name)


# ---- credits
