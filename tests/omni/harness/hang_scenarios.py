"""Ask a scheduled pipeline of which a replica is stopped: its process lives, but gives no output."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from dev.omni_cpu.spec import PipelineSpec
from tests.omni.harness import stage_scenarios as stages


async def stopped(omni: Any, spec: PipelineSpec, prefix: str) -> stages.Result:
    """SIGSTOP for the first replica of the first stage in the middle of its work."""
    pool = omni.engine.stage_pools[0]
    before = await stages.ask_all(omni, spec, f"{prefix}-before", stages.CROWD)
    answers = asyncio.create_task(stages.ask_all(omni, spec, f"{prefix}-stopped", stages.CROWD))
    await stages.until(lambda: stages.in_the_middle(pool))
    held = sum(work.replica_id == 0 for work in list(pool.queue.running.values()))
    for process in pool.clients[0].resources.engine_manager.processes:
        os.kill(process.pid, signal.SIGSTOP)
    result = {"before": before, "held": held, "answers": await answers}
    await stages.until(lambda: len(pool.live_replica_ids()) == pool.num_replicas)
    # reports are read every few seconds, and the page is written once a second
    await stages.until(lambda: any(name == "edge_bytes_total" for name, _, _ in stages.samples()))
    await stages.until(lambda: any(labels.get("kind") == "back" and value for _, labels, value in stages.samples()))
    return result | {"metrics": [[name, labels, value] for name, labels, value in stages.samples()]}


HANG_SCENARIOS: dict[str, Callable[[Any, PipelineSpec, str], Awaitable[stages.Result]]] = {"stopped": stopped}
