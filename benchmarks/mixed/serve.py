"""One engine that serves rounds of mixed requests, as told on stdin: the subprocess that `benchmarks.mixed` starts.

{"do": "round", "load": 0.5, "seconds": 20, "seed": 3} → {"kind": "round", "requests": [{"kind": "text", …}, …]}
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks.harness.child import emit
from benchmarks.harness.processes import ProcessTree
from benchmarks.mixed.workload import Arrival, arrivals


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--options", default="{}", help="our options, as JSON")
    options = parser.parse_args()
    engine = build_engine(options.model, options.variant, json.loads(options.options))
    try:
        import vllm

        tree = ProcessTree()
        emit("up", vllm=vllm.__version__)
        turn = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            turn += 1
            plan = arrivals(request["load"], request["seconds"], request["seed"], frames=request.get("frames", 0))
            emit("round", **await serve(engine, tree, turn, plan))
    finally:
        engine.shutdown()


def build_engine(model: str, variant: str, options: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 20_480,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "limit_mm_per_prompt": {"image": 32},
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
    }
    if variant != "stock":
        arguments["scheduler_cls"] = "vllm_omni_sched.OmniScheduler"
        arguments["additional_config"] = {"omni_sched": {"encode_ahead": True, **options}}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def serve(engine: Any, tree: ProcessTree, turn: int, plan: list[Arrival]) -> dict[str, Any]:
    """Each request at its time, whatever became of those before."""
    prompts = [prompt_of(arrival) for arrival in plan]
    before, started = tree.usage(), time.monotonic()

    async def one(i: int) -> dict[str, Any]:
        await asyncio.sleep(max(0.0, plan[i].at - (time.monotonic() - started)))
        return await stream(engine, f"{turn}-{i}", prompts[i], plan[i])

    requests = await asyncio.gather(*(one(i) for i in range(len(plan))))
    seconds, after = time.monotonic() - started, tree.usage()
    return {
        "requests": requests,
        "seconds": seconds,
        "cpu_seconds": {role: use.cpu_seconds - before[role].cpu_seconds for role, use in after.items()},
    }


def prompt_of(arrival: Arrival) -> dict[str, Any]:
    from PIL import Image

    words = " ".join(["word"] * arrival.prompt_words)
    if not arrival.image_seeds:
        return {"prompt": words}
    images = [
        Image.fromarray(np.random.default_rng(seed).integers(0, 255, (336, 336, 3), dtype=np.uint8))
        for seed in arrival.image_seeds
    ]
    return {"prompt": "<image>" * len(images) + words, "multi_modal_data": {"image": images}}


async def stream(engine: Any, request_id: str, prompt: dict[str, Any], arrival: Arrival) -> dict[str, Any]:
    """TTFT and the intervals between later outputs, in seconds, as a client sees them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=arrival.output_tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    times = [time.monotonic()]
    tokens: list[int] = []
    async for output in engine.generate(prompt, sampling, request_id=request_id):
        times.append(time.monotonic())
        tokens += output.outputs[0].token_ids
    if len(tokens) != arrival.output_tokens:
        raise RuntimeError(f"request {request_id} got {len(tokens)} of {arrival.output_tokens} tokens")
    return {
        "kind": arrival.kind,
        "at": round(times[0], 6),
        "images": len(arrival.image_seeds),
        "tokens": len(tokens),
        "ttft": times[1] - times[0],
        "gaps": [round(b - a, 6) for a, b in itertools.pairwise(times[1:])],
        "digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
    }


if __name__ == "__main__":
    asyncio.run(main())
