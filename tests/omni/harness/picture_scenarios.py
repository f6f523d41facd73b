"""Ask a pipeline that ends in a diffusion stage for pictures.

Each returns `{"answers": {request: {"pictures": [[width, height, sha256 of the pixels]], "ends": number}}, …}`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dev.omni_cpu.asking import Draw, drawing_params
from dev.omni_cpu.spec import DIFFUSION, PipelineSpec
from tests.omni.harness.stage_scenarios import counted, held, until
from vllm_omni_sched.core.pipeline.events import Action, Start

HOUSE = Draw("A house by the sea.", seed=1)
DRAWS = {
    "house": HOUSE,
    "other seed": HOUSE._replace(seed=2),
    "more steps": HOUSE._replace(steps=120),
    "larger": HOUSE._replace(side=96),
    "boat": Draw("A boat.", seed=1),
}
CROWD = {f"crowd {number}": Draw(f"Picture {number % 3}", seed=number, steps=40 + number) for number in range(10)}
MANY = 5

Result = dict[str, Any]


async def pictures(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask all that the other scenarios ask."""
    return {"answers": await _all(omni, spec, prefix, DRAWS | CROWD)}


async def same_pictures(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask for the same picture many times, and for another one."""
    draws = {f"house {number}": DRAWS["house"] for number in range(MANY)}
    draws |= {f"boat {number}": DRAWS["boat"] for number in range(2)}
    return await _counted_answers(omni, spec, prefix, draws)


async def one_prompt(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask for pictures of the same text with different seeds, steps and sizes, each twice."""
    names = [name for name, draw in DRAWS.items() if draw.prompt == HOUSE.prompt]
    return await _counted_answers(omni, spec, prefix, {f"{name} {i}": DRAWS[name] for i in range(2) for name in names})


async def no_seed(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask three times without a seed: each request must get a picture of its own."""
    draws = {f"house {number}": HOUSE._replace(seed=None) for number in range(3)}
    return await _counted_answers(omni, spec, prefix, draws)


async def picture_costs(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Return what the scheduler knows about requests when it chooses a replica for them."""
    stage = DIFFUSION[spec.pipeline]
    queue = omni.engine.stage_pools[stage].queue
    known: dict[str, Any] = {}
    plain = queue.do

    def do(action: Action, now: float) -> None:
        if isinstance(action, Start):
            work = action.work
            features = work.known.features[stage]
            known[work.request_id] = [features.pixels, features.steps, work.cost_seconds]
        plain(action, now)

    queue.do = do
    try:
        answers = await _all(omni, spec, prefix, DRAWS)
    finally:
        del queue.do
    return {"answers": answers, "known": dict(zip(DRAWS, [known[name] for name in sorted(known)], strict=True))}


async def painter_killed(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """SIGKILL for the first replica of the diffusion stage while it draws; then, the replica being back, all again."""
    pool = omni.engine.stage_pools[DIFFUSION[spec.pipeline]]
    answers = asyncio.create_task(_all(omni, spec, f"{prefix}-once", CROWD))
    await until(lambda: any(work.replica_id == 0 and work.sent for work in list(pool.queue.running.values())))
    lost = sum(work.replica_id == 0 for work in list(pool.queue.running.values()))
    os.kill(pool.clients[0]._proc_manager.proc.pid, signal.SIGKILL)
    result = {"answers": await answers, "lost": lost}
    await until(lambda: len(pool.live_replica_ids()) == pool.num_replicas)
    result |= {"again": await _all(omni, spec, f"{prefix}-again", CROWD)}
    await until(lambda: not any(held(each) for each in omni.engine.stage_pools))
    return result


PICTURE_SCENARIOS: dict[str, Callable[[Any, PipelineSpec, str], Awaitable[Result]]] = {
    "pictures": pictures,
    "same_pictures": same_pictures,
    "one_prompt": one_prompt,
    "no_seed": no_seed,
    "picture_costs": picture_costs,
    "painter_killed": painter_killed,
}


async def _counted_answers(omni: Any, spec: PipelineSpec, prefix: str, draws: Mapping[str, Draw]) -> Result:
    with counted(omni) as submitted:
        return {"answers": await _all(omni, spec, prefix, draws), "submitted": submitted}


async def _all(omni: Any, spec: PipelineSpec, prefix: str, draws: Mapping[str, Draw]) -> dict[str, Any]:
    """At a time; a request that fails answers with its error."""
    answers = [_drawn(omni, f"{prefix}-{number:02}", draw) for number, draw in enumerate(draws.values())]
    return dict(zip(draws, await asyncio.gather(*answers), strict=True))


async def _drawn(omni: Any, request_id: str, draw: Draw) -> dict[str, Any]:
    answer: dict[str, Any] = {"pictures": [], "ends": 0}
    try:
        outputs = omni.generate(draw.prompt, request_id=request_id, sampling_params_list=drawing_params(draw))
        async for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            answer["ends"] += bool(output.finished)
            for picture in output.images:
                answer["pictures"].append(picture_of(picture))
    except Exception as error:  # noqa: BLE001  the test that compares answers shows it
        answer["error"] = str(error)
    return answer


def picture_of(picture: Any) -> list[Any]:
    """Return the size of a picture and the digest of its pixels."""
    return [*picture.size, hashlib.sha256(picture.tobytes()).hexdigest()]
