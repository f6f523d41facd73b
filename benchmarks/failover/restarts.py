"""Replicas that start again when their checkpoint is not in the page cache, in a pipeline that runs.

The subprocess that `preload.py` starts. Stages are processes of their own as vLLM-Omni starts them: each imports vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from benchmarks.harness.child import emit
from benchmarks.stages.probe import Probe, until
from dev.omni_cpu.running import running
from dev.omni_cpu.spec import PipelineSpec
from vllm_omni_sched.omni.stages.start.preload import weight_files

STAGE, REPLICA = 1, 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--spec", type=json.loads, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    import vllm_omni

    spec, probe = PipelineSpec(**options.spec), Probe()
    probe.install()
    with running(spec, model=options.model, folder=options.folder) as omni:
        emit("up", vllm_omni=vllm_omni.__version__)
        for _ in range(options.rounds):
            emit("restart", **asyncio.run(restart(omni, probe, weight_files(options.model))))


async def restart(omni: Any, probe: Probe, files: list[Path]) -> dict[str, Any]:
    """Kill the replica when its checkpoint has left the page cache; return what its start took."""
    evict(files)
    cold = 1 - cached_fraction(files)
    pool, known = omni.engine.stage_pools[STAGE], len(probe.restarts)
    gone = pool.clients[REPLICA]
    for process in gone.resources.engine_manager.processes:
        os.kill(process.pid, signal.SIGKILL)
    back = await until(lambda: REPLICA in pool.live_replica_ids() and pool.clients[REPLICA] is not gone)
    return {"cold": cold, "seconds": probe.restarts[-1] if back and len(probe.restarts) > known else None}


def evict(files: list[Path]) -> None:
    """Remove files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_fraction(files: list[Path], samples: int = 64) -> float:
    """Return the fraction of some pages of the files that are in the page cache."""
    found = tried = 0
    for file in files:
        descriptor, size = os.open(file, os.O_RDONLY), file.stat().st_size
        try:
            for sample in range(samples):
                tried += 1
                try:
                    found += os.preadv(descriptor, [bytearray(1)], size * sample // samples, os.RWF_NOWAIT)
                except BlockingIOError:
                    continue
        finally:
            os.close(descriptor)
    return found / tried


if __name__ == "__main__":
    main()
