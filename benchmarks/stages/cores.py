"""Give each replica of a stage a processor core of its own, so that replicas do not take time from each other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

TASKS = Path("/proc")


def assignment(cores: Iterable[int], replicas: int) -> tuple[list[int], list[int]] | None:
    """Return the core of each replica, and the cores of everything else; None if there are too few.

    If each core has a replica, everything else runs on all of them.
    """
    usable = sorted(cores)
    if len(usable) < replicas:
        return None
    own, rest = usable[:replicas], usable[replicas:]
    return own, rest or usable


def separate(omni: Any, stage_id: int) -> list[int]:
    """Pin the replicas of a stage to cores of their own; return these, none if there are too few.

    All other processes of the pipeline, and this one, run on the cores that are left, if there are any.
    """
    pools = omni.engine.stage_pools
    replicas = pools[stage_id].live_replica_ids()
    found = assignment(os.sched_getaffinity(0), len(replicas))
    if found is None:
        return []
    own, rest = found
    pin([os.getpid()], rest)
    for pool in pools:
        for number, replica_id in enumerate(pool.live_replica_ids()):
            cores = [own[number]] if pool.stage_id == stage_id else rest
            pin([process.pid for process in pool.clients[replica_id].resources.engine_manager.processes], cores)
    return own


def pin(pids: Sequence[int], cores: Sequence[int]) -> None:
    """Let all present threads of these processes and of their children run on these cores alone."""
    for pid in pids:
        children = [] if pid == os.getpid() else psutil.Process(pid).children(recursive=True)
        for process in (pid, *(child.pid for child in children)):
            for thread in (TASKS / str(process) / "task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)
