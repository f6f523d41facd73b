"""One pipeline that answers waves of requests, as told on stdin: the subprocess that `pair.py` starts twice.

{"requests": [{"name": …, "at": 0.0, …}], "together": true, "kill": null} → {"kind": "wave", "told": […], …}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.harness.child import emit
from benchmarks.stages.cores import separate
from benchmarks.stages.probe import Probe
from dev.omni_cpu import forkserver
from dev.omni_cpu.asking import Ask, sampling_params, take
from dev.omni_cpu.running import running
from dev.omni_cpu.spec import PipelineSpec

ANSWER_SECONDS = 120.0  # then a request counts as not answered


def main(serve: Callable[[Any, PipelineSpec, Probe], Coroutine[Any, Any, None]]) -> None:
    """Start the pipeline that the command line describes and let ``serve`` answer what stdin asks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--spec", type=json.loads, required=True)
    parser.add_argument("--pin", type=int, help="stage whose replicas get a core each")
    options = parser.parse_args()
    forkserver.start()
    import vllm_omni
    import vllm_omni.entrypoints.async_omni

    forkserver.use_for_stages()
    spec, probe = PipelineSpec(**options.spec), Probe()
    probe.install()
    began = time.monotonic()
    with running(spec, model=options.model, folder=options.folder) as omni:
        cores = [] if options.pin is None else separate(omni, options.pin)
        emit("up", vllm_omni=vllm_omni.__version__, seconds=time.monotonic() - began, cores=cores)
        asyncio.run(serve(omni, spec, probe))


async def serve(omni: Any, spec: PipelineSpec, probe: Probe) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        emit("wave", **await wave(omni, spec, probe, json.loads(line)))


async def wave(omni: Any, spec: PipelineSpec, probe: Probe, asked: dict[str, Any]) -> dict[str, Any]:
    """Serve the requests of one wave, each when it is due, or one after the other."""
    submitted, cpu = probe.submitted.copy(), probe.cpu_seconds()
    requests, began = asked["requests"], time.monotonic()
    death = None
    if asked["together"]:
        tasks = [asyncio.create_task(one(omni, spec, request, began)) for request in requests]
        if asked["kill"]:
            killing = probe.kill(in_flight=lambda: sum(not task.done() for task in tasks), **asked["kill"])
            death = await killing
        told = await asyncio.gather(*tasks)
    else:
        told = [await one(omni, spec, request, time.monotonic()) for request in requests]
    cpu_now = probe.cpu_seconds()
    return {
        "told": told,
        "seconds": max(each["end"] for each in told),
        "runs": {f"{stage}/{replica}": n for (stage, replica), n in (probe.submitted - submitted).items()},
        "cpu_seconds": {who: seconds - cpu.get(who, 0.0) for who, seconds in cpu_now.items()},
        "death": death,
    }


async def one(omni: Any, spec: PipelineSpec, request: dict[str, Any], began: float) -> dict[str, Any]:
    """Times in seconds since ``began``."""
    from vllm.sampling_params import RequestOutputKind

    params = sampling_params(spec, Ask(request["prompt"], request["thinks"], request["says"]))
    if request["stream"]:
        params[0].output_kind = RequestOutputKind.DELTA
    if request["sla"]:
        params[0].extra_args = {"omni_class": request["sla"]}
    await asyncio.sleep(max(began + request["at"] - time.monotonic(), 0.0))
    answer: dict[str, Any] = {"text": {}}
    first = error = None
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            asking = omni.generate(request["prompt"], request_id=request["name"], sampling_params_list=params)
            async for output in asking:
                if output.error:
                    raise RuntimeError(output.error)
                first = first or time.monotonic() - began
                said = answer["text"].get("0", []) if request["stream"] else []
                take(output, answer)
                if said and output.final_output_type == "text":
                    answer["text"]["0"] = said + answer["text"]["0"]
    except Exception as failure:  # noqa: BLE001 - however a request fails: it has no answer
        error = f"{type(failure).__name__}: {failure}"[:300]
    end = time.monotonic() - began
    if "sound" in answer:  # its samples would be most of what is printed
        answer["sound"] = [zlib.crc32(str(answer["sound"]).encode())]
    return {"at": request["at"], "first": first, "end": end, "answer": None if error else answer, "error": error}


if __name__ == "__main__":
    main(serve)
