"""What is asked of a pipeline whose stages branch, and of the lines that its branches are."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from dev.omni_cpu.asking import Ask, sampling_params, take
from dev.omni_cpu.spec import PipelineSpec
from tests.omni.harness.stage_scenarios import ask_all, counted, held, in_the_middle, until

MANY = {
    f"many {number}": Ask(
        f"Number {number} of those" + " who ask" * (number % 5), thinks=5 + number % 7, says=9 + 5 * number % 17
    )
    for number in range(64)
}
"""No two of them are equal."""

Result = dict[str, Any]


async def many(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask all at a time."""
    with counted(omni) as submitted:
        return {"answers": await ask_all(omni, spec, prefix, MANY), "submitted": submitted}


async def only_text(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask some for text alone: what makes sound is not run."""
    asks = dict(list(MANY.items())[:8])
    with counted(omni) as submitted:
        answers = await asyncio.gather(
            *(_text_of(omni, spec, f"{prefix}-{number}", ask) for number, ask in enumerate(asks.values()))
        )
    return {"answers": dict(zip(asks, answers, strict=True)), "submitted": submitted}


async def _text_of(omni: Any, spec: PipelineSpec, request_id: str, ask: Ask) -> Result:
    answer: Result = {"text": {}}
    params = sampling_params(spec, ask)
    async for output in omni.generate(
        ask.prompt, request_id=request_id, sampling_params_list=params, output_modalities=["text"]
    ):
        take(output, answer)
    return answer


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
    result["again"] = await ask_all(omni, spec, f"{prefix}-again", dict(list(MANY.items())[:8]))
    await until(lambda: not any(held(each) for each in pools))
    return result


BRANCH_SCENARIOS: dict[str, Callable[[Any, PipelineSpec, str], Awaitable[Result]]] = {
    "many": many,
    "only_text": only_text,
    "branch_killed": partial(branch_killed, stage_id=2),
}
