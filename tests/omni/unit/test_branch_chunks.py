"""Stages that branch and exchange chunks: they start together, and run again together."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.engine.messages import AbortRequestMessage, ErrorMessage

from tests.support.omni_stages import Rig, StageSpec, engine_output, params
from tests.support.omni_stages import StageSpec as Spec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

PROMPT = (1, 2, 3)


def speech_and_picture(replicas: int = 1) -> list[StageSpec]:
    """A thinker that streams to a talker and that to a vocoder, and a painter that gets the thinker's whole text."""
    return [
        Spec(replicas, final_output=True, chunks=True),
        Spec(replicas, edge=True, chunks=True),
        Spec(replicas, final_output=True, sources=(0,)),
        Spec(replicas, final_output=True, edge=True, chunks=True, sources=(1,)),
    ]


def two_readers(replicas: int = 1) -> list[StageSpec]:
    """A thinker that streams to two others."""
    return [
        Spec(replicas, chunks=True),
        Spec(replicas, final_output=True, edge=True, chunks=True),
        Spec(replicas, final_output=True, edge=True, chunks=True, sources=(0,)),
    ]


def later_group() -> list[StageSpec]:
    """A writer whose text a thinker gets from the front end, which streams to a talker; and a painter."""
    return [
        Spec(),
        Spec(final_output=True, chunks=True),
        Spec(final_output=True, edge=True, chunks=True),
        Spec(final_output=True, sources=(0,)),
    ]


def made(*path: int) -> list[int]:
    found = list(PROMPT)
    for stage_id in path:
        found = engine_output(stage_id, found)
    return found


def present(rig: Rig) -> list[list[str]]:
    """Return the requests that the engines of each stage have, by the names that clients know."""
    return [[name.partition("~")[0] for name in rig.at(stage)] for stage in range(len(rig.stages))]


async def finish(rig: Rig, stage_id: int, name: str = "a") -> None:
    """Finish a request under the name of its present run."""
    await rig.finish(stage_id, next(one for one in rig.at(stage_id) if one.partition("~")[0] == name))


def outputs(rig: Rig, name: str = "a") -> dict[int, list[int]]:
    told = rig.told(name)
    assert not [one for one in told if isinstance(one, ErrorMessage)], told
    assert [one.finished for one in told].count(True) == 1
    assert told[-1].finished
    return {one.stage_id: list(one.engine_outputs.outputs[0].token_ids) for one in told}


def nothing_left(rig: Rig) -> None:
    assert (rig.left_over(), rig.edges.lying) == ({}, {})


async def test_stages_that_exchange_chunks_start_at_once_and_others_with_the_whole_output() -> None:
    async with Rig(*speech_and_picture(), async_chunk=True) as rig:
        await rig.ask("a", outputs=[0, 2, 3])
        await rig.settle()
        assert present(rig) == [["a"], ["a"], [], ["a"]]
        await rig.finish(0, "a")
        assert present(rig) == [[], ["a"], ["a"], ["a"]]
        for stage_id in (1, 3, 2):
            await finish(rig, stage_id)
        assert outputs(rig) == {0: made(0), 2: made(0, 2), 3: made(0, 1, 3)}
        nothing_left(rig)


async def test_stages_that_exchange_chunks_start_when_the_first_of_them_does() -> None:
    async with Rig(*later_group(), async_chunk=True) as rig:
        await rig.ask("a", outputs=[1, 2, 3])
        await rig.settle()
        assert present(rig) == [["a"], [], [], []]
        await rig.finish(0, "a")
        assert present(rig) == [[], ["a"], ["a"], ["a"]]
        for stage_id in (1, 2, 3):
            await finish(rig, stage_id)
        assert outputs(rig) == {1: made(0, 1), 2: made(0, 1, 2), 3: made(0, 3)}
        nothing_left(rig)


async def test_the_end_of_the_last_output_waits_for_stages_that_have_not_reported_theirs() -> None:
    """As in vLLM-Omni, the last stage may end before the front end hears of the end of the one before."""
    async with Rig(*speech_and_picture(), async_chunk=True) as rig:
        await rig.ask("a", outputs=[3])
        await rig.finish(0, "a")
        talker = rig.at(1)["a"]
        assert talker.input_of("a") is not None
        rig.edges.put("1", "3", "a@3_1_0", {"tokens": {"1": made(0, 1)}, "meta": {"finished": True}})
        await finish(rig, 3)
        assert not [one for one in rig.told("a") if one.finished]
        await finish(rig, 1)
        assert outputs(rig) == {0: made(0), 3: made(0, 1, 3)}
        rig.edges.lying.clear()  # the talker's own chunk came twice here
        assert rig.left_over() == {}


# ---- deaths


@pytest.mark.parametrize("dead", [0, 1, 3])
async def test_stages_that_exchange_chunks_run_again_together_under_new_names(dead: int) -> None:
    async with Rig(*speech_and_picture(replicas=2), async_chunk=True) as rig:
        await rig.ask("a", outputs=[0, 2, 3])
        await rig.step(0, "a")
        await rig.kill(dead, rig.replica_id(dead, "a"))
        assert present(rig) == [["a"], ["a"], [], ["a"]]
        assert all("a" not in rig.at(stage) for stage in (0, 1, 3))
        for stage_id in (0, 1, 3, 2):
            await finish(rig, stage_id)
        assert outputs(rig) == {0: made(0), 2: made(0, 2), 3: made(0, 1, 3)}
        nothing_left(rig)


async def test_the_death_of_a_stage_that_reads_no_chunks_disturbs_no_other() -> None:
    async with Rig(*speech_and_picture(replicas=2), async_chunk=True) as rig:
        await rig.ask("a", outputs=[0, 2, 3])
        await rig.finish(0, "a")
        await rig.step(2, "a")
        await rig.kill(2, rig.replica_id(2, "a"))
        assert present(rig) == [[], ["a"], ["a"], ["a"]]
        assert list(rig.at(1)) == ["a"]
        for stage_id in (1, 3, 2):
            await finish(rig, stage_id)
        assert outputs(rig) == {0: made(0), 2: made(0, 2), 3: made(0, 1, 3)}
        nothing_left(rig)


async def test_a_stage_that_dies_before_its_last_chunk_was_sent_runs_again_with_its_readers() -> None:
    async with Rig(*speech_and_picture(replicas=2), async_chunk=True) as rig:
        await rig.ask("a", outputs=[0, 2, 3])
        at = rig.replica_id(0, "a")
        rig.replica(0, at).sends_late = True
        await rig.finish(0, "a")
        await rig.kill(0, at)
        assert present(rig) == [["a"], ["a"], ["a"], ["a"]]
        for stage_id in (0, 1, 3, 2):
            await finish(rig, stage_id)
        assert outputs(rig) == {0: made(0), 2: made(0, 2), 3: made(0, 1, 3)}
        nothing_left(rig)


async def test_chunks_of_a_run_that_is_over_are_not_taken_and_do_not_lie_about() -> None:
    async with Rig(*two_readers(replicas=2), async_chunk=True) as rig:
        await rig.ask("a", outputs=[1, 2])
        await rig.finish(0, "a")
        await rig.kill(1, rig.replica_id(1, "a"))
        assert sorted(rig.edges.lying) == ["a@1_0_0", "a@2_0_0"]
        for stage_id in (0, 1, 2):
            await finish(rig, stage_id)
        assert outputs(rig) == {1: made(0, 1), 2: made(0, 2)}
        nothing_left(rig)


# ---- errors and aborts


async def test_an_aborted_request_leaves_no_chunk() -> None:
    async with Rig(*two_readers(), async_chunk=True) as rig:
        await rig.ask("a", outputs=[1, 2])
        await rig.finish(0, "a")
        await rig.omni._handle_abort(AbortRequestMessage(request_ids=["a"]))
        await rig.settle()
        assert present(rig) == [[], [], []]
        nothing_left(rig)


async def test_chunks_that_a_stage_has_not_received_at_its_end_do_not_stay() -> None:
    """End a stage by its own limit, after the stage that it reads and before it has received all."""
    async with Rig(*two_readers(), async_chunk=True) as rig:
        await rig.ask("a", outputs=[1, 2])
        await rig.finish(0, "a")
        for number in (1, 2):
            rig.edges.lying[f"a@2_0_{number}"] = rig.edges.lying["a@2_0_0"]
        await finish(rig, 2)
        await finish(rig, 1)
        assert outputs(rig) == {1: made(0, 1), 2: made(0, 2)}
        nothing_left(rig)


# ---- many


async def test_many_requests_with_deaths_each_get_each_output_once() -> None:
    runtime = {"recovery": {"max_redispatches": 5}}
    async with Rig(*speech_and_picture(replicas=2), async_chunk=True, runtime=runtime) as rig:
        names = [f"r{number:02}" for number in range(24)]
        wanted: dict[str, set[int]] = {}
        for number, name in enumerate(names):
            asked = [[0, 2, 3], [3], [2], [0]][number % 4]
            wanted[name] = {0, *asked}
            each = [params(max_tokens=16 + number) for _ in range(4)]
            await rig.ask(name, PROMPT, outputs=asked, each=each)
        await rig.settle()
        for turn in range(80):
            at = {stage: rig.at(stage) for stage in range(4)}
            if not any(at.values()):
                break
            for stage in (3, 2, 1, 0):
                for name in list(at[stage])[:4]:
                    replica = rig.at(stage).get(name)
                    if replica is not None and replica.input_of(name) is not None:
                        await rig.finish(stage, name)
            if turn in (1, 3, 5):
                await rig.kill((0, 1, 2)[turn // 2], 0)
        await rig.settle()
        made_of: dict[int, Any] = {0: made(0), 2: made(0, 2), 3: made(0, 1, 3)}
        for name in names:
            assert outputs(rig, name) == {stage: made_of[stage] for stage in wanted[name]}
        nothing_left(rig)
