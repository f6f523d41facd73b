"""Faults at random moments: replicas are killed or stopped, and links are cut, while requests run, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from dev.omni_cpu.asking import Ask
from dev.omni_cpu.spec import PipelineSpec
from tests.omni.harness import stage_scenarios as stages
from tests.support.descriptors import open_now
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.monitor.recovery.events import Replica

ROUNDS = 3  # of a block
BLOCKS = 24
DIFFERENT, EQUAL = 4, 4  # requests of a round, and how often each is asked
LONGEST_SECONDS = 2.0  # before the fault
HANG_SECONDS = 100.0  # a round that takes longer hangs
CUT_SECONDS = 1.0  # that a link stays cut, at most
ALL_BLOCKS = 10  # of the rounds in which each kind of fault has its turn


async def faults(
    omni: Any, spec: PipelineSpec, prefix: str, *, seed: int, signals: Sequence[signal.Signals]
) -> stages.Result:
    """Rounds of requests, of which several are equal; in each round, one replica gets one of the signals.

    A replica that has used up its restarts is left alone: without it, requests fail as they should. A round has
    `open`, too: what the front end has open when the replica is back.
    """
    rng = Random(f"{seed} {spec.mode}")
    rounds: list[dict[str, Any]] = []
    for number in range(ROUNDS):
        replicas = [
            (pool, replica_id)
            for pool in omni.engine.stage_pools
            for replica_id in pool.live_replica_ids()
            if _may_die(omni, pool.stage_id, replica_id)
        ]
        stage_id = rng.choice(sorted({pool.stage_id for pool, _ in replicas}))
        pool, replica_id = rng.choice([one for one in replicas if one[0].stage_id == stage_id])
        how = rng.choice(signals)
        asks = _asked(rng)
        asking = asyncio.create_task(stages.ask_all(omni, spec, f"{prefix}-{number}", asks))
        await asyncio.sleep(rng.uniform(0.0, LONGEST_SECONDS))
        processes = processes_of(pool, replica_id)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # recovery has ended it since
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
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        gone = {process.pid for process in processes}
        await stages.until(partial(all_complete, omni, gone))
        rounds[-1]["open"] = open_now()
    return {"rounds": rounds}


def _asked(rng: Random) -> dict[str, Ask]:
    crowd = {name: stages.CROWD[name] for name in rng.sample(sorted(stages.CROWD), DIFFERENT)}
    return stages.equal(crowd, EQUAL)


def _may_die(omni: Any, stage_id: int, replica_id: int) -> bool:
    """Return whether recovery would start the replica again."""
    recovery = omni.engine.stage_pools[0].queue._driver.core.recovery.policy
    attempts, options = recovery._watched[Replica(stage_id, replica_id)].attempts, recovery.options
    recent = [at for at in attempts if at > monotonic_seconds() - options.window_seconds]
    return len(recent) < options.max_restarts


async def every_kind(omni: Any, spec: PipelineSpec, prefix: str, *, seed: int) -> stages.Result:
    """One round of requests for each of `KINDS`; the connector is `CutConnector`, and checkpoints are read ahead.

    Returns `{"rounds": […]}`.
    """
    rng, rounds = Random(f"every kind {seed}"), []
    for kind, do in KINDS.items():
        ask = partial(stages.ask_all, omni, spec, f"{prefix}-{kind}", _asked(rng))
        asking, fault, processes = await do(omni, spec, rng, ask)
        done, _ = await asyncio.wait([asking], timeout=HANG_SECONDS)
        rounds.append({"kind": kind, "fault": fault, "answers": asking.result() if done else None})
        print(f"{kind}: {fault}, {'answered' if done else 'HANGS'}", flush=True)
        if not done:
            asking.cancel()
            break
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        gone = {process.pid for process in processes}
        await stages.until(partial(all_complete, omni, gone))
    return {"rounds": rounds}


Asking = Callable[[], Coroutine[Any, Any, dict[str, Any]]]
Fault = tuple[asyncio.Task[dict[str, Any]], str, list[Any]]
"""The requests, what was done, and the processes that are to be replaced."""


async def _one_replica(how: signal.Signals, omni: Any, spec: PipelineSpec, rng: Random, ask: Asking) -> Fault:
    asking = await _begun(ask, rng)
    pool = rng.choice(omni.engine.stage_pools)
    replica_id = rng.choice(pool.live_replica_ids())
    processes = processes_of(pool, replica_id)
    _signal(processes, how)
    return asking, f"{how.name} of stage {pool.stage_id} replica {replica_id}", processes


async def _all_replicas(omni: Any, spec: PipelineSpec, rng: Random, ask: Asking) -> Fault:
    asking = await _begun(ask, rng)
    pool = omni.engine.stage_pools[spec.replicated]
    processes = [one for replica_id in pool.live_replica_ids() for one in processes_of(pool, replica_id)]
    _signal(processes, signal.SIGKILL)
    return asking, f"SIGKILL of all {len(processes)} replicas of stage {pool.stage_id}", processes


async def _begun(ask: Ask, rng: Random) -> asyncio.Task[dict[str, Any]]:
    """Ask the requests, and return some time later."""
    asking = asyncio.create_task(ask())
    await asyncio.sleep(rng.uniform(0.0, LONGEST_SECONDS))
    return asking


async def _cut_link(omni: Any, spec: PipelineSpec, rng: Random, ask: Asking) -> Fault:
    """Cut all links before the requests come, until a payload was refused and for up to `CUT_SECONDS` after that."""
    with _cut(Path(spec.extra["cut"])) as refused:
        asking = asyncio.create_task(ask())
        await stages.until(refused)
        await asyncio.sleep(rng.uniform(0.0, CUT_SECONDS))
        count = refused()
    return asking, f"all links cut, {count} times a payload was refused", []


@contextmanager
def _cut(file: Path) -> Iterator[Callable[[], int]]:
    file.touch()
    try:
        yield lambda: file.stat().st_size
    finally:
        file.unlink()


def _signal(processes: list[Any], how: signal.Signals) -> None:
    for process in processes:
        os.kill(process.pid, how)


KINDS: dict[str, Callable[[Any, PipelineSpec, Random, Asking], Awaitable[Fault]]] = {
    "killed": partial(_one_replica, signal.SIGKILL),
    "stopped": partial(_one_replica, signal.SIGSTOP),
    "all_killed": _all_replicas,
    "link_cut": _cut_link,
}


def processes_of(pool: Any, replica_id: int) -> list[Any]:
    client = pool.clients[replica_id]
    return [] if client is None else list(client.resources.engine_manager.processes)


def all_complete(omni: Any, gone: set[int]) -> bool:
    """Return whether all replicas of all stages are there, with processes that live and are none of those ``gone``."""
    return all(complete(pool, gone) for pool in omni.engine.stage_pools)


def complete(pool: Any, gone: set[int]) -> bool:
    """Return whether all replicas of a stage are there; a process that was killed may look alive for a moment."""
    live = pool.live_replica_ids()
    return len(live) == pool.num_replicas and all(
        process.is_alive() and process.pid not in gone
        for replica_id in live
        for process in processes_of(pool, replica_id)
    )


FAULT_SCENARIOS: dict[str, Callable[[Any, PipelineSpec, str], Awaitable[stages.Result]]] = {
    f"{name}_{seed}": partial(faults, seed=seed, signals=signals)
    for name, signals in {"faults": (signal.SIGKILL, signal.SIGSTOP), "deaths": (signal.SIGKILL,)}.items()
    for seed in range(BLOCKS)
} | {f"every_kind_{seed}": partial(every_kind, seed=seed) for seed in range(ALL_BLOCKS)}
