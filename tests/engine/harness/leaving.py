"""Clients that leave, or are refused, beside clients that ask the same pictures and stay: a program.

`python -m tests.engine.harness.leaving MODEL SIDE` prints JSON: of each case, how many clients stayed, and how many of
them were answered. SIDE is `stock`, `ours`, or `pool` for ours with the preprocessing pool.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from typing import Any

from tests.engine.harness.sources import image_prompt

TOKENS = 3
PICTURES = 6
CLIENTS = 60
ANSWER_SECONDS = 40  # stock leaves some without any answer
LIMIT_SECONDS = 240


def main(model: str, side: str) -> None:
    """Start the engine, let clients ask, and print what they were told."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args: dict[str, Any] = {"model": model, "dtype": "float32", "enforce_eager": True, "load_format": "dummy"}
    args |= {"max_model_len": 256, "enable_log_requests": False}
    if side != "stock":
        options = {"preprocess": {"processes": 1}} if side == "pool" else {}
        args |= {"scheduler_cls": "vllm_omni_sched.OmniScheduler", "additional_config": {"omni_sched": options}}

    async def run() -> dict[str, list[int]]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        try:
            return await asyncio.wait_for(cases(engine), LIMIT_SECONDS)
        finally:
            engine.shutdown()

    print(json.dumps(asyncio.run(run())))


async def cases(engine: Any) -> dict[str, list[int]]:
    """Return [clients that stayed, clients that were answered, items without data] of each case."""
    sent_without: list[str] = []
    send = engine.engine_core.add_request_async

    async def counting(request: Any) -> None:
        sent_without.extend(one.identifier for one in request.mm_features or () if one.data is None)
        await send(request)

    engine.engine_core.add_request_async = counting
    found = {}
    for case in (prepared_and_dropped, dropped_in_between, refused, at_random, sent_before):
        sent_without.clear()
        stayed = await case(engine)
        found[case.__name__] = [len(stayed), sum(stayed), len(sent_without)]
    return found


async def answered(engine: Any, prompt: Any, name: str, tokens: int = TOKENS) -> bool:
    """Return whether a request got all of its tokens."""
    from vllm import SamplingParams

    got = 0
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            async for output in engine.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), name):
                got = len(output.outputs[0].token_ids)
    except Exception as error:  # noqa: BLE001 - of the engine's errors, each is one answer that is missing
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return got == tokens


async def prepared(engine: Any, number: int) -> Any:
    """Return a prompt that is prepared, as the server does before it hands it to the engine."""
    prompt = image_prompt("<image>what?", [number])
    ids = engine.renderer.get_tokenizer().encode(prompt["prompt"], add_special_tokens=False)
    return await engine.renderer._process_multimodal_async(ids, prompt["multi_modal_data"], None, None)


async def prepared_and_dropped(engine: Any) -> list[bool]:
    """The first client leaves after its request was prepared; the second asks the same."""
    await prepared(engine, 100)
    gc.collect()
    return [await answered(engine, image_prompt("<image>what?", [100]), "after")]


async def dropped_in_between(engine: Any) -> list[bool]:
    """The second request is prepared before the first client leaves."""
    first = await prepared(engine, 101)
    second = await prepared(engine, 101)
    del first
    gc.collect()
    return [await answered(engine, second, "second"), await answered(engine, await prepared(engine, 101), "third")]


async def refused(engine: Any) -> list[bool]:
    """The first request is too long for the model."""
    assert not await answered(engine, image_prompt("<image>" + "what? " * 300, [102]), "too long")
    gc.collect()
    return [await answered(engine, image_prompt("<image>what?", [102]), "short")]


async def at_random(engine: Any) -> list[bool]:
    """A third of many clients leaves at any time; pictures come up again and again."""
    chance = random.Random(0)
    clients = [
        (
            asyncio.create_task(
                answered(engine, image_prompt("<image>what?", [200 + chance.randrange(PICTURES)]), f"random-{n}")
            ),
            chance.random() < 1 / 3,
            chance.randrange(40),
        )
        for n in range(CLIENTS)
    ]
    for turn in range(40):
        for client, leaves, at in clients:
            if leaves and at == turn:
                client.cancel()
        await asyncio.sleep(0.005 if turn % 4 == 0 else 0)
    results = await asyncio.gather(*(client for client, _, _ in clients), return_exceptions=True)
    return [result is True for result, (_, leaves, _) in zip(results, clients, strict=True) if not leaves]


async def sent_before(engine: Any) -> list[bool]:
    """Data that the engine core has is not sent again."""
    return [await answered(engine, image_prompt("<image>what?", [100 + n]), f"again-{n}") for n in range(3)]


if __name__ == "__main__":
    main(*sys.argv[1:])
