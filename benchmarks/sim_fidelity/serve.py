"""Serve rounds of the mixed load, read from stdin, with one engine, and report when each step was.

{"load": 0.5, "seconds": 20, "seed": 3} → {"kind": "round", "requests": [{"at": …, "text_tokens": …, …}, …]}
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from typing import Any

from benchmarks.harness.child import emit
from benchmarks.mixed.serve import build_engine, prompt_of
from benchmarks.mixed.workload import Arrival, arrivals

REFERENCE_TOKENS = 200


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", required=True)
    options = parser.parse_args()
    engine = build_engine(options.model, options.variant, {})
    try:
        import vllm

        emit("up", vllm=vllm.__version__)
        turn = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            turn += 1
            plan = arrivals(asked["load"], asked["seconds"], asked["seed"])
            before = await reference(engine, f"{turn}-before")
            requests = await serve(engine, turn, plan)
            emit("round", requests=requests, references=[before, await reference(engine, f"{turn}-after")])
    finally:
        engine.shutdown()


async def reference(engine: Any, name: str) -> dict[str, float]:
    """Serve a request that decodes alone; return the median ``seconds`` of its steps, and the tokens that they read."""
    began = time.monotonic()
    prompt, arrival = {"prompt": " ".join(["word"] * 10)}, Arrival(0.0, 10, (), REFERENCE_TOKENS)
    found = await stream(engine, name, prompt, arrival, began, 0)
    return {"seconds": statistics.median(found["gaps"]), "context": found["text_tokens"] + REFERENCE_TOKENS / 2}


async def serve(engine: Any, turn: int, plan: list[Arrival]) -> list[dict[str, Any]]:
    """Send each request at its time, without waiting for earlier ones."""
    prompts = [prompt_of(arrival) for arrival in plan]
    embeds = engine.vllm_config.model_config.hf_config.image_seq_length
    began = time.monotonic()

    async def one(i: int) -> dict[str, Any]:
        await asyncio.sleep(max(0.0, began + plan[i].at - time.monotonic()))
        return await stream(engine, f"{turn}-{i}", prompts[i], plan[i], began, embeds)

    return list(await asyncio.gather(*(one(i) for i in range(len(plan)))))


async def stream(
    engine: Any, name: str, prompt: dict[str, Any], arrival: Arrival, began: float, embeds: int
) -> dict[str, Any]:
    """Serve one request and return its times: ``at`` since the round began, others since then; ``gaps``: of outputs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=arrival.output_tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    called = time.monotonic()
    times: list[float] = []
    tokens, prompt_tokens, stats = 0, 0, None
    async for output in engine.generate(prompt, sampling, request_id=name):
        times.append(time.monotonic())
        tokens += len(output.outputs[0].token_ids)
        prompt_tokens, stats = len(output.prompt_token_ids), output.metrics
    if tokens != arrival.output_tokens:
        raise RuntimeError(f"request {name} got {tokens} of {arrival.output_tokens} tokens")
    images = len(arrival.image_seeds)
    return {
        "at": round(called - began, 6),
        "text_tokens": prompt_tokens - images * embeds,
        "embeds": [embeds] * images,
        "output_tokens": tokens,
        "ttft": round(times[0] - called, 6),
        "gaps": [round(b - a, 6) for a, b in itertools.pairwise(times)],
        # when the engine core had it, when its first step began, and when that had ended
        "parts": [round(at - called, 6) for at in (stats.queued_ts, stats.scheduled_ts, stats.first_token_ts)],
    }


if __name__ == "__main__":
    asyncio.run(main())
