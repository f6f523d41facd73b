"""Faults at random moments: a replica of any stage is killed or stopped while requests run, again and again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Any

from dev.omni_cpu.spec import PipelineSpec
from tests.omni.harness import stage_scenarios as stages

ROUNDS = 3  # of a block
BLOCKS = 24
AT_ONCE = 8
LONGEST_SECONDS = 2.0  # before the fault
HANG_SECONDS = 100.0  # a round that takes longer hangs


async def faults(omni: Any, spec: PipelineSpec, prefix: str, *, seed: int) -> stages.Result:
    """Rounds of requests, in each of which one replica is killed (SIGKILL) or stopped (SIGSTOP)."""
    rng, rounds = Random(f"{seed} {spec.mode}"), []
    for number in range(ROUNDS):
        pool = rng.choice(omni.engine.stage_pools)
        replica_id = rng.choice(pool.live_replica_ids())
        how = rng.choice([signal.SIGKILL, signal.SIGSTOP])
        names = rng.sample(sorted(stages.CROWD), AT_ONCE)
        asks = {name: stages.CROWD[name] for name in names}
        asking = asyncio.create_task(stages.ask_all(omni, spec, f"{prefix}-{number}", asks))
        await asyncio.sleep(rng.uniform(0.0, LONGEST_SECONDS))
        processes = processes_of(pool, replica_id)
        for process in processes:
            os.kill(process.pid, how)
        done, _ = await asyncio.wait([asking], timeout=HANG_SECONDS)
        fault = f"{how.name} of stage {pool.stage_id} replica {replica_id}"
        rounds.append({"fault": fault, "answers": asking.result() if done else None})
        print(f"round {number}: {fault}, {'answered' if done else 'HANGS'}", flush=True)
        if not done:
            asking.cancel()
            break
        for process in processes:
            if process.is_alive():  # it was stopped when it had nothing to do any more
                os.kill(process.pid, signal.SIGKILL)
        await stages.until(lambda: all(map(complete, omni.engine.stage_pools)))
    return {"rounds": rounds}


def processes_of(pool: Any, replica_id: int) -> list[Any]:
    client = pool.clients[replica_id]
    return [] if client is None else list(client.resources.engine_manager.processes)


def complete(pool: Any) -> bool:
    """Whether all replicas of a stage are there, with processes that live."""
    live = pool.live_replica_ids()
    return len(live) == pool.num_replicas and all(
        process.is_alive() for replica_id in live for process in processes_of(pool, replica_id)
    )


FAULT_SCENARIOS: dict[str, Callable[[Any, PipelineSpec, str], Awaitable[stages.Result]]] = {
    f"faults_{seed}": partial(faults, seed=seed) for seed in range(BLOCKS)
}
