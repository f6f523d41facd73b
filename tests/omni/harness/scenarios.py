"""Ask a pipeline. Each scenario returns `{request: {"text": {stage: token ids}, "sound": samples}}`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from dev.omni_cpu.asking import Ask, answer_to, sampling_params, take
from dev.omni_cpu.spec import PipelineSpec

ASKS = {
    "short": Ask("How do you do?", thinks=5, says=9),
    "long": Ask("What crosses an edge " * 12, thinks=17, says=23),
    "one word": Ask("?", thinks=1, says=6),
    "equal": Ask("As much is thought as said.", thinks=12, says=12),
}
ABORTED = Ask("This one is never heard to its end.", thinks=600, says=700)
ABORT_AFTER_TOKENS = 8

Answers = dict[str, dict[str, Any]]


async def one_by_one(omni: Any, spec: PipelineSpec, prefix: str) -> Answers:
    return {name: await answer_to(omni, spec, f"{prefix}-{number}", ask) for number, (name, ask) in _numbered()}


async def together(omni: Any, spec: PipelineSpec, prefix: str) -> Answers:
    answers = [answer_to(omni, spec, f"{prefix}-{number}", ask) for number, (_, ask) in _numbered()]
    return dict(zip(ASKS, await asyncio.gather(*answers), strict=True))


async def one_leaves(omni: Any, spec: PipelineSpec, prefix: str) -> Answers:
    """Ask as in `together`, beside a request whose client leaves early; then, when all have ended, ask once more."""
    leaving = asyncio.create_task(_leave_early(omni, spec, f"{prefix}-leaving"))
    answers = await together(omni, spec, prefix)
    await leaving
    return answers | {"afterwards": await answer_to(omni, spec, f"{prefix}-after", ASKS["short"])}


def blocking(omni: Any, spec: PipelineSpec) -> Answers:
    """Ask vLLM-Omni's `Omni`, which names requests itself, twice for each kind, so that two replicas have work."""
    answers: Answers = {}
    for name, ask in ASKS.items():
        params, found = sampling_params(spec, ask), defaultdict[str, dict[str, Any]](lambda: {"text": {}})
        for output in omni.generate([ask.prompt] * 2, sampling_params_list=params, use_tqdm=False):
            take(output, found[output.request_id])
        answers |= {f"{name} {number}": answer for number, answer in enumerate(found.values())}
    return answers


SCENARIOS: dict[str, Callable[[Any, PipelineSpec, str], Awaitable[Answers]]] = {
    "one_by_one": one_by_one,
    "together": together,
    "one_leaves": one_leaves,
}


def _numbered() -> list[tuple[int, tuple[str, Ask]]]:
    return list(enumerate(ASKS.items()))


async def _leave_early(omni: Any, spec: PipelineSpec, request_id: str) -> None:
    outputs = omni.generate(ABORTED.prompt, request_id=request_id, sampling_params_list=sampling_params(spec, ABORTED))
    async with aclosing(outputs):
        async for output in outputs:
            if output.stage_id == 0 and len(output.outputs[0].token_ids) >= ABORT_AFTER_TOKENS:
                return
    raise RuntimeError("the request that was to be left was answered in full")
