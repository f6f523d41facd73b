"""Serve waves of requests, read from stdin, with one pipeline, and report when each output came.

{"requests": [{"at": 0.0, "prompt_tokens": 40, "thinks": 12, "says": 24}, …]} → {"kind": "wave", "told": […], …}
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.child import emit
from benchmarks.stages.probe import Probe
from benchmarks.stages.serve import ANSWER_SECONDS, main
from dev.omni_cpu.asking import Ask, sampling_params
from dev.omni_cpu.spec import PipelineSpec

_numbers = itertools.count()


async def serve(omni: Any, spec: PipelineSpec, probe: Probe) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        requests = json.loads(line)["requests"]
        cpu, began = cpu_seconds(probe), time.monotonic()
        told = await asyncio.gather(*(one(omni, spec, request, began) for request in requests))
        cpu_now = cpu_seconds(probe)
        emit(
            "wave",
            told=told,
            seconds=time.monotonic() - began,
            cpu_seconds={process: seconds - cpu.get(process, 0.0) for process, seconds in cpu_now.items()},
        )


def cpu_seconds(probe: Probe) -> dict[str, float]:
    """Return the processor seconds of the front end and of each replica so far, in nanoseconds' precision.

    `Probe.cpu_seconds` counts in ticks.
    """
    pids = {
        f"{stage}/{replica}": probe.pids(stage, replica)
        for stage, pool in sorted(probe.pools.items())
        for replica in pool.live_replica_ids()
    }
    return {process: sum(map(_of_process, own)) for process, own in {"front end": [os.getpid()], **pids}.items()}


def _of_process(pid: int) -> float:
    """Return the processor seconds of all living threads of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def one(omni: Any, spec: PipelineSpec, request: dict[str, Any], began: float) -> dict[str, Any]:
    """Send one request and return its times.

    ``at``: since the wave began; the others: since then. ``outputs``: of the first stage.

    Raises:
        RuntimeError: it failed.
    """
    number = next(_numbers)
    # a token for each character
    prompt = f"Request {number} asks.".ljust(request["prompt_tokens"], ".")[: request["prompt_tokens"]]
    params = sampling_params(spec, Ask(prompt, request["thinks"], request["says"]))
    await asyncio.sleep(max(began + request["at"] - time.monotonic(), 0.0))
    called = time.monotonic()
    outputs: list[float] = []
    tokens: list[int] = []
    prompt_tokens, end = 0, 0.0
    async with asyncio.timeout(ANSWER_SECONDS):
        async for output in omni.generate(prompt, request_id=f"fidelity-{number}", sampling_params_list=params):
            if output.error:
                raise RuntimeError(output.error)
            end = time.monotonic() - called
            if output.stage_id == 0:
                outputs.append(end)
                tokens.append(len(output.outputs[0].token_ids))
                prompt_tokens = len(output.prompt_token_ids or ())
    return {
        "at": called - began,
        "late": called - began - request["at"],
        "prompt_tokens": prompt_tokens,
        "thinks": request["thinks"],
        "says": request["says"],
        "outputs": outputs,
        "tokens": tokens,
        "end": end,
    }


if __name__ == "__main__":
    main(serve)
