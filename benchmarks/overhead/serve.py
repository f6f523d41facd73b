"""One engine that serves rounds of text requests, as told on stdin: the subprocess that `benchmarks.overhead` starts.

A request and its answer:

    {"do": "round", "requests": 32, "tokens": 64} → {"kind": "round", "tokens_per_second": …, "itl_seconds": {…}, …}
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from typing import Any

from benchmarks.harness.child import emit
from benchmarks.harness.processes import ProcessTree
from benchmarks.harness.stats import quantile

PROMPT = "Tell me what a scheduler does while it waits for a picture to be decoded, number {}."


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", required=True)
    options = parser.parse_args()
    engine = build_engine(options.model, options.variant)
    try:
        import vllm

        tree = ProcessTree()
        emit("up", processes=tree.roles(), vllm=vllm.__version__)
        rounds = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            rounds += 1
            emit("round", **await serve(engine, tree, rounds, request["requests"], request["tokens"]))
    finally:
        engine.shutdown()


def build_engine(model: str, variant: str) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 64,
    }
    if variant == "ours":
        arguments["scheduler_cls"] = "vllm_omni_sched.OmniScheduler"
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def serve(engine: Any, tree: ProcessTree, turn: int, requests: int, tokens: int) -> dict[str, Any]:
    """`requests` at once, `tokens` output tokens each. Intervals are between the outputs a client sees."""
    before, started = tree.usage(), time.monotonic()
    answers = await asyncio.gather(*(stream(engine, f"{turn}-{i}", tokens) for i in range(requests)))
    seconds, after = time.monotonic() - started, tree.usage()
    gaps = [gap for _, own in answers for gap in own]
    return {
        "tokens_per_second": requests * tokens / seconds,
        "ttft_seconds": quantile([first for first, _ in answers], 0.5),
        "itl_seconds": {"median": quantile(gaps, 0.5), "p99": quantile(gaps, 0.99)},
        "cpu_seconds_per_token": {
            role: (use.cpu_seconds - before[role].cpu_seconds) / (requests * tokens) for role, use in after.items()
        },
    }


async def stream(engine: Any, request_id: str, tokens: int) -> tuple[float, list[float]]:
    """(time to first token, intervals between the later outputs), seconds."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    times = [time.monotonic()]
    received = 0
    async for output in engine.generate(PROMPT.format(request_id), sampling, request_id=request_id):
        times.append(time.monotonic())
        received += len(output.outputs[0].token_ids)
    if received != tokens:
        raise RuntimeError(f"request {request_id} got {received} of {tokens} tokens")
    gaps = [after - before for before, after in itertools.pairwise(times[1:])]
    return times[1] - times[0], gaps


if __name__ == "__main__":
    asyncio.run(main())
