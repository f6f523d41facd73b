"""What is asked of a pipeline whose stages branch, and of the lines that its branches are."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from dev.omni_cpu.asking import WORDS, Ask, sampling_params, speaking_and_drawing_params, take
from dev.omni_cpu.spec import PipelineSpec
from tests.omni.harness.picture_scenarios import CROWD, DRAWS, picture_of
from tests.omni.harness.stage_scenarios import ask_all, counted, equal, held, in_the_middle, until

MANY = {
    f"many {number}": Ask(
        f"Number {number} of those" + " who ask" * (number % 5), thinks=5 + number % 7, says=9 + 5 * number % 17
    )
    for number in range(64)
}
"""No two of them are equal."""
FEW = dict(list(MANY.items())[:8])
EQUAL = 4  # requests with the same content
SPOKEN = {name: 9 + 3 * number for number, name in enumerate(DRAWS | CROWD)}
"""How many codes the talker says of what is drawn."""

Result = dict[str, Any]


async def many(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask all at a time."""
    with counted(omni) as submitted:
        return {"answers": await ask_all(omni, spec, prefix, MANY), "submitted": submitted}


async def only_text(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask some for text alone: what makes sound is not run."""
    with counted(omni) as submitted:
        answers = await asyncio.gather(
            *(_text_of(omni, spec, f"{prefix}-{number}", ask) for number, ask in enumerate(FEW.values()))
        )
    return {"answers": dict(zip(FEW, answers, strict=True)), "submitted": submitted}


async def few(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask some at a time."""
    with counted(omni) as submitted:
        return {"answers": await ask_all(omni, spec, prefix, FEW), "submitted": submitted}


async def merged(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask some at a time, each several times."""
    asks = equal(FEW, EQUAL)
    with counted(omni) as submitted:
        return {"answers": await ask_all(omni, spec, prefix, asks), "submitted": submitted}


async def spoken(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask for the sound alone of what `spoken_pictures` asks for."""
    asks = {name: Ask(draw.prompt, WORDS, SPOKEN[name]) for name, draw in (DRAWS | CROWD).items()}
    return {"answers": await ask_all(omni, spec, prefix, asks)}


async def spoken_pictures(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask for text, sound and pictures."""

    async def ask(name: str, request_id: str) -> Result:
        draw = (DRAWS | CROWD)[name]
        params = speaking_and_drawing_params(spec, draw, SPOKEN[name])
        answer: Result = {"text": {}, "pictures": []}
        async for output in omni.generate(draw.prompt, request_id=request_id, sampling_params_list=params):
            if output.error:
                raise RuntimeError(f"{name}: {output.error}")
            if output.final_output_type == "image":
                answer["pictures"] += map(picture_of, output.images)
            else:
                take(output, answer)
        return answer

    with counted(omni) as submitted:
        answers = await asyncio.gather(*(ask(name, f"{prefix}-{at}") for at, name in enumerate(DRAWS | CROWD)))
    return {"answers": dict(zip(DRAWS | CROWD, answers, strict=True)), "submitted": submitted}


async def _text_of(omni: Any, spec: PipelineSpec, request_id: str, ask: Ask) -> Result:
    answer: Result = {"text": {}}
    params = sampling_params(spec, ask)
    async for output in omni.generate(
        ask.prompt, request_id=request_id, sampling_params_list=params, output_modalities=["text"]
    ):
        take(output, answer)
    return answer


SAID_AT_LENGTH = {
    "at length": Ask("What is said at length.", thinks=90, says=40),
    "at length too": Ask("What else is said at length.", thinks=80, says=50),
}


async def thinker_killed(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """SIGKILL for the only replica of the first stage while it speaks to several clients that ask the same."""
    undisturbed = await ask_all(omni, spec, f"{prefix}-before", SAID_AT_LENGTH)
    pool = omni.engine.stage_pools[0]
    with counted(omni) as submitted:
        asks = equal(SAID_AT_LENGTH, 2 * EQUAL)
        answers = asyncio.create_task(ask_all(omni, spec, prefix, asks))
        await until(lambda: _receivers(pool) == len(asks) and in_the_middle(pool))
        for process in pool.clients[0].resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        result = {"undisturbed": undisturbed, "answers": await answers, "submitted": submitted}
    await until(lambda: pool.live_replica_ids() == [0])
    return result


def _receivers(pool: Any) -> int:
    return sum(len(pool.queue.receivers(name)) for name in list(pool.queue.running))


async def branch_killed(omni: Any, spec: PipelineSpec, prefix: str, *, stage_id: int) -> Result:
    """SIGKILL for the first replica of a branch in the middle of its work; then, the replica being back, some again."""
    pools = omni.engine.stage_pools
    pool = pools[stage_id]
    before = pool.live_replica_ids()
    with counted(omni) as submitted:
        answers = asyncio.create_task(ask_all(omni, spec, f"{prefix}-once", MANY))
        await until(lambda: in_the_middle(pool))
        lost = sum(work.replica_id == 0 for work in list(pool.queue.running.values()))
        for process in pool.clients[0].resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        result: Result = {"answers": await answers, "lost": lost, "submitted": submitted}
    await until(lambda: pool.live_replica_ids() == before)
    result["again"] = await ask_all(omni, spec, f"{prefix}-again", FEW)
    await until(lambda: not any(held(each) for each in pools))
    return result


BRANCH_SCENARIOS: dict[str, Callable[[Any, PipelineSpec, str], Awaitable[Result]]] = {
    "many": many,
    "few": few,
    "merged_in_branches": merged,
    "only_text": only_text,
    "thinker_killed": thinker_killed,
    "branch_killed": partial(branch_killed, stage_id=2),
}
BRANCHES_ALONE = {"spoken": spoken, "spoken_pictures": spoken_pictures}
