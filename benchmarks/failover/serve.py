"""A pipeline in which replicas are killed or stopped as told on stdin: the subprocess that `faults.py` starts.

{"requests": […], "fault": null or {"signal": "SIGKILL", "stage_id": 1, "replica_ids": [0]}} →
{"kind": "wave", "told": […], "at": wall-clock time of the fault or null}
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.harness.child import emit
from benchmarks.stages.probe import Probe, until
from benchmarks.stages.serve import main
from dev.omni_cpu.asking import Ask, sampling_params, take
from dev.omni_cpu.spec import PipelineSpec

ANSWER_SECONDS = 100.0  # then a request hangs
AFTER = 3  # requests have come to the stage when the fault happens


async def serve(omni: Any, spec: PipelineSpec, probe: Probe) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        emit("wave", **await wave(omni, spec, probe, asked["requests"], asked["fault"]))


async def wave(
    omni: Any, spec: PipelineSpec, probe: Probe, requests: list[dict[str, Any]], fault: dict[str, Any] | None
) -> dict[str, Any]:
    """Serve requests that come at once, and let the fault happen meanwhile; all replicas are back at the end."""
    before = probe.runs(fault["stage_id"]) if fault else 0
    tasks = [asyncio.create_task(one(omni, spec, request)) for request in requests]
    at, pids = None, list[int]()
    if fault:
        await until(lambda: probe.runs(fault["stage_id"]) - before >= AFTER)
        pids = [pid for replica_id in fault["replica_ids"] for pid in probe.pids(fault["stage_id"], replica_id)]
        at = time.time()
        for pid in pids:
            os.kill(pid, signal.Signals[fault["signal"]])
    told = await asyncio.gather(*tasks)
    for pid in pids:
        if os.path.exists(f"/proc/{pid}"):  # it was stopped when it had nothing to do any more
            os.kill(pid, signal.SIGKILL)
    pools = omni.engine.stage_pools
    back = await until(lambda: all(_is_complete(pool, pids) for pool in pools)) if pids else 0.0
    return {"told": told, "at": at, "back": back is not None}


def _is_complete(pool: Any, gone: list[int]) -> bool:
    """Return whether all replicas of a stage serve, and none of these processes is among them."""
    live = pool.live_replica_ids()
    present = [process.pid for each in live for process in pool.clients[each].resources.engine_manager.processes]
    return len(live) == pool.num_replicas and not set(present) & set(gone)


async def one(omni: Any, spec: PipelineSpec, request: dict[str, Any]) -> dict[str, Any]:
    """Ask one request; ``ends``: how often each stage told that the request was done."""
    params = sampling_params(spec, Ask(request["prompt"], request["thinks"], request["says"]))
    answer: dict[str, Any] = {"text": {}}
    ends: Counter[str] = Counter()
    error, hangs = None, False
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            asking = omni.generate(request["prompt"], request_id=request["name"], sampling_params_list=params)
            async for output in asking:
                if output.error:
                    raise RuntimeError(output.error)
                ends[str(output.stage_id)] += bool(output.finished)
                take(output, answer)
    except TimeoutError:
        error, hangs = "no answer in time", True
    except Exception as failure:  # noqa: BLE001 - however a request fails: it has no answer
        error = f"{type(failure).__name__}: {failure}"[:300]
    return {"answer": None if error else answer, "ends": dict(ends), "error": error, "hangs": hangs}


if __name__ == "__main__":
    main(serve)
