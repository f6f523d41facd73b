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
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np

from benchmarks.harness.child import emit
from benchmarks.harness.processes import ProcessTree
from benchmarks.mixed import VARIANTS
from benchmarks.mixed.workload import Arrival, arrivals

CHUNK_SECONDS = 0.25
QUIET = "benchmarks.harness.quiet.QuietWorker"
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 20_480,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "limit_mm_per_prompt": {"image": 32},
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0,
    "gpu_memory_utilization": 0.5,  # several engines share the machine's memory
}
LARGE: dict[str, Any] = {  # on a GPU: CUDA graphs for decode steps, without the minutes of a compiler
    "dtype": "bfloat16",
    "load_format": "dummy",
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128],
    },
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.45,
}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--options", default="{}", help="our options, as JSON")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--engine", default="{}", help="arguments of the engine, as JSON")
    parser.add_argument("--side", type=int, default=336, help="of a picture, in pixels")
    parser.add_argument("--large", action="store_true", help="a model for a GPU")
    options = parser.parse_args()
    more = {**(LARGE if options.large else {}), **json.loads(options.engine)}
    engine = build_engine(options.model, options.variant, json.loads(options.options), options.tensor_parallel, more)
    try:
        import vllm

        tree = ProcessTree()
        emit("up", vllm=vllm.__version__)
        turn = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            turn += 1
            drawn = {name: request.get(name, 0) for name in ("frames", "pictures")}
            plan = arrivals(request["load"], request["seconds"], request["seed"], **drawn)
            chunks = round(request["seconds"] / CHUNK_SECONDS) if request.get("session") else 0
            emit("round", **await serve(engine, tree, turn, plan, chunks, options.side))
    finally:
        engine.shutdown()


def build_engine(
    model: str,
    variant: str,
    options: dict[str, Any],
    tensor_parallel: int = 1,
    more: Mapping[str, Any] | None = None,
) -> Any:
    """Build the engine of a variant; ``more`` overrides what `ENGINE` says."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {"model": model, **ENGINE, **(more or {})}
    if tensor_parallel > 1:  # ranks poll for their next message, and would take the time of the other engine's
        arguments |= {"tensor_parallel_size": tensor_parallel, "worker_extension_cls": QUIET}
    ours = VARIANTS[variant]
    if ours is not None:
        arguments["scheduler_cls"] = "vllm_omni_sched.OmniScheduler"
        arguments["additional_config"] = {"omni_sched": {**ours, **options}}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def serve(
    engine: Any, tree: ProcessTree, turn: int, plan: list[Arrival], session_chunks: int = 0, side: int = 336
) -> dict[str, Any]:
    """Send each request at its time, whatever became of the others, beside a realtime session of so many chunks."""
    prompts = [prompt_of(arrival, side) for arrival in plan]
    before, started = tree.usage(), time.monotonic()

    async def one(i: int) -> dict[str, Any]:
        await asyncio.sleep(max(0.0, plan[i].at - (time.monotonic() - started)))
        return await stream(engine, f"{turn}-{i}", prompts[i], plan[i])

    everybody = [one(i) for i in range(len(plan))]
    if session_chunks:
        everybody.append(session(engine, f"{turn}-session", session_chunks))
    requests = await asyncio.gather(*everybody)
    seconds, after = time.monotonic() - started, tree.usage()
    return {
        "requests": requests,
        "seconds": seconds,
        "cpu_seconds": {role: use.cpu_seconds - before[role].cpu_seconds for role, use in after.items()},
    }


async def session(engine: Any, request_id: str, chunks: int) -> dict[str, Any]:
    """Run a streaming session that gets three tokens four times per second and answers each time with one."""
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    sent: list[float] = []

    async def inputs() -> AsyncGenerator[Any, None]:
        began = time.monotonic()
        for i in range(chunks):
            await asyncio.sleep(max(0.0, began + i * CHUNK_SECONDS - time.monotonic()))
            sent.append(time.monotonic())
            yield StreamingInput(prompt={"prompt_token_ids": [5 + i % 7, 20, 30]})

    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    tokens: list[int] = []
    latencies = []
    async for output in engine.generate(inputs(), sampling, request_id=request_id):
        if output.outputs[0].token_ids:
            latencies.append(round(time.monotonic() - sent[len(latencies)], 6))
            tokens += output.outputs[0].token_ids
    return {
        "kind": "session",
        "images": 0,
        "tokens": len(tokens),
        "at": round(sent[0], 6),
        "ttft": latencies[0],
        "gaps": [],
        "latencies": latencies,
        "digest": digest_of(tokens),
    }


def digest_of(tokens: list[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def prompt_of(arrival: Arrival, side: int = 336) -> dict[str, Any]:
    from PIL import Image

    words = " ".join(["word"] * arrival.prompt_words)
    if not arrival.image_seeds:
        return {"prompt": words}
    images = [
        Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))
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
        "digest": digest_of(tokens),
    }


if __name__ == "__main__":
    asyncio.run(main())
