"""One engine, K realtime sessions of N frames each, closed loop: the subprocess that `benchmarks.realtime` starts.

The next frame is made from the last output, so a session is never fed faster than it is answered: as `/v1/realtime`.
Events: `up` with the processes, one `bucket` per bucket of frames, `done`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from benchmarks.harness.child import emit
from benchmarks.harness.processes import ProcessTree
from benchmarks.harness.stats import quantile
from benchmarks.realtime import FRAME_SAMPLES

VARIANTS = ("stock", "ours")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--frames", type=int, required=True)
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--bucket", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    asyncio.run(measure(parser.parse_args()))


async def measure(options: argparse.Namespace) -> None:
    started = time.monotonic()
    engine = build_engine(options)
    try:
        tree = ProcessTree()
        emit("up", seconds=round(time.monotonic() - started, 1), processes=tree.roles(), versions=versions())
        meter = Meter(options.sessions, options.bucket, tree)
        await asyncio.gather(*(run_session(engine, i, options, meter) for i in range(options.sessions)))
        emit("done", seconds=round(time.monotonic() - started, 1))
    finally:
        engine.shutdown()


def build_engine(options: argparse.Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": options.model,
        "load_format": "mistral",
        "tokenizer_mode": "mistral",
        "config_format": "mistral",
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 1024,
        "max_model_len": max(4096, options.frames + 1024),  # 32 + some tokens of prompt and padding come on top
        "disable_log_stats": True,
        **options.engine,
    }
    if options.variant == "ours":
        arguments["scheduler_cls"] = "vllm_omni_sched.OmniScheduler"
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def run_session(engine: Any, index: int, options: argparse.Namespace, meter: Meter) -> None:
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.model_executor.models.voxtral_realtime import VoxtralRealtimeGeneration
    from vllm.sampling_params import RequestOutputKind

    answers: asyncio.Queue[list[int]] = asyncio.Queue()
    audio = noise(options.frames, options.seed + index)

    async def prompts() -> AsyncGenerator[Any, None]:
        async for prompt in VoxtralRealtimeGeneration.buffer_realtime_audio(audio, answers, engine.model_config):
            yield StreamingInput(prompt=prompt)

    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(prompts(), sampling, request_id=f"session-{index}"):
        answers.put_nowait(list(output.outputs[0].token_ids))
        meter.frame(index)


async def noise(frames: int, seed: int) -> AsyncGenerator[Any, None]:
    """Yield `frames` chunks of float32 noise, shape (1280,), all different: equal ones would be one cached item."""
    import numpy as np

    random = np.random.default_rng(seed)
    for _ in range(frames):
        yield (random.normal(size=FRAME_SAMPLES) * 0.01).astype(np.float32)


class Meter:
    """Seconds between the outputs of a session, reported whenever session 0 completes a bucket of frames.

    With several sessions a bucket holds the intervals of all of them in that time. Nothing older than a bucket is kept,
    so the memory of this process is the memory of the engine's client.
    """

    def __init__(self, sessions: int, bucket: int, tree: ProcessTree):
        self.bucket, self.tree = bucket, tree
        self.frames = [0] * sessions
        self.last = [time.monotonic()] * sessions
        self.intervals: list[float] = []
        self.bucket_started = time.monotonic()
        self.used = tree.usage()

    def frame(self, session: int) -> None:
        now = time.monotonic()
        self.intervals.append(now - self.last[session])
        self.last[session] = now
        self.frames[session] += 1
        if session == 0 and self.frames[0] % self.bucket == 0:
            self.flush(now)

    def flush(self, now: float) -> None:
        usage = self.tree.usage()
        emit(
            "bucket",
            frames=self.frames[0],
            seconds_per_frame={
                "median": quantile(self.intervals, 0.5),
                "p99": quantile(self.intervals, 0.99),
                "mean": (now - self.bucket_started) / self.bucket,
            },
            cpu_seconds_per_frame={
                role: (use.cpu_seconds - self.used[role].cpu_seconds) / self.bucket
                for role, use in usage.items()
                if role in self.used
            },
            rss_bytes={role: use.rss_bytes for role, use in usage.items()},
        )
        self.intervals.clear()
        self.bucket_started, self.used = time.monotonic(), usage
        # What the report itself took belongs to no frame.
        self.last = [last + (self.bucket_started - now) for last in self.last]


def versions() -> dict[str, str]:
    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    main()
