"""Replicas that move while requests run; a scenario returns as those of `stage_scenarios` do."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil

from dev.omni_cpu.spec import PipelineSpec
from tests.omni.harness.stage_scenarios import CROWD, Result, ask_all, until
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.omni.stages.placement.replica_migrator import MigrationOutcome

ON_ONE_CORE = "1"  # a device of `dev.omni_cpu.platform`


async def moved(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Many ask, three times: while a replica of the talker goes to the thinker, while it comes back, and while it goes
    to another device."""
    pools = omni.engine.stage_pools
    migrator = pools[0].queue._hooks.migrator
    result: Result = {"outcomes": [], "live": [], "answers": [], "stopped": []}
    for step, how in enumerate(
        (
            lambda: migrator.hand_over(Replica(1, 1), 0),
            lambda: migrator.hand_over(Replica(0, 1), 1),
            lambda: migrator.relocate(Replica(1, 1), ON_ONE_CORE),
        )
    ):
        leaving = _process(pools[0 if step == 1 else 1].clients[1])
        answers = asyncio.create_task(ask_all(omni, spec, f"{prefix}-{step}", CROWD))
        await until(lambda: any(pool.queue.running for pool in pools[1:]))
        result["outcomes"].append((await _carried_out(migrator, how)).value)
        result["answers"].append(await answers)
        result["live"].append([pool.live_replica_ids() for pool in pools])
        result["stopped"].append(not psutil.pid_exists(leaving.pid))
    again = await ask_all(omni, spec, f"{prefix}-again", CROWD)
    result["answers"].append(again)
    result["cores"] = _process(pools[1].clients[1]).cpu_affinity()
    return result


async def _carried_out(migrator: Any, how: Any) -> MigrationOutcome:
    """Begin a move on the event loop of the orchestrator, in another thread, and return its outcome."""
    begun: list[Any] = []
    tick = migrator.tick

    def ticking() -> None:
        if not begun:
            begun.append(how())
        tick()

    migrator.tick = ticking
    try:
        await until(lambda: begun and (isinstance(begun[0], MigrationOutcome) or begun[0].done()))
    finally:
        del migrator.tick
    found: MigrationOutcome = begun[0] if isinstance(begun[0], MigrationOutcome) else begun[0].result()
    return found


def _process(client: Any) -> psutil.Process:
    return psutil.Process(client.resources.engine_manager.processes[0].pid)


MOVE_SCENARIOS = {"moved": moved}
