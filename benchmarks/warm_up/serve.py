"""A fresh engine and ten requests with an image, one by one: the subprocess that `benchmarks.warm_up` starts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json

from benchmarks.harness.child import emit
from benchmarks.mixed.serve import build_engine, prompt_of, stream
from benchmarks.mixed.workload import Arrival


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--options", default="{}", help="our options, as JSON")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--beside", action="store_true", help="a text request decodes meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    engine = build_engine(options.model, options.variant, json.loads(options.options))
    try:
        import vllm

        beside = None
        if options.beside:
            text = Arrival(0.0, 10, (), 16_000)
            beside = asyncio.create_task(stream(engine, "text", prompt_of(text), text))
            await asyncio.sleep(1.0)  # until it decodes
        for i in range(options.requests):
            arrival = Arrival(0.0, 10, (options.seed * 1000 + i,), 4)
            answer = await stream(engine, f"image-{i}", prompt_of(arrival), arrival)
            emit("image", ttft=answer["ttft"], digest=answer["digest"])
        if beside is not None:
            beside.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beside
        emit("done", vllm=vllm.__version__)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
