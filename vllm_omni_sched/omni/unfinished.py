"""Remove messages from vLLM-Omni's shared memory whose sender was killed before it had finished them."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.branch_connector import OmniBranchConnector

logger = get_logger(__name__)

SHARED_MEMORY = Path("/dev/shm")
LOCK = "_lockfile.lock"
_KEY = re.compile(r"(?P<request>.+?)(~\d+)?(@\d+)?_\d+_\d+", re.DOTALL)
"""Of a message: the request, a mark of its run, the stage that it is for, the one that sends it, and its number."""


def remove_left(request_ids: Collection[str]) -> int:
    """Remove the messages that requests of a pipeline have left in vLLM-Omni's shared memory; return their number.

    A request that leaves early is not there to receive what is sent for it. When the pipeline ends, Python removes the
    segments, and the lock file of each stays until the host restarts.

    Args:
        request_ids: of requests of this pipeline alone; files of all others are left as they are.
    """
    connector, removed = SharedMemoryConnector({}), 0
    for lock in SHARED_MEMORY.glob(f"shm_*{LOCK}"):
        key = lock.name.removeprefix("shm_").removesuffix(LOCK)
        found = _KEY.fullmatch(key)
        if found is not None and found["request"] in request_ids:
            connector.cleanup(key)  # which refuses a segment without a size
            (SHARED_MEMORY / key).unlink(missing_ok=True)
            removed += 1
    return removed


def remove_unfinished(connector: Any, from_stage: str, to_stage: str, key: str) -> bool:
    """Remove what is left of a message that `get` did not return, and that nobody wants; return whether there was any.

    `SharedMemoryConnector.put` makes a lock file, then a segment without a size, and then gives it its size. Each of
    these steps releases the interpreter lock, so that a busy process stays between them for milliseconds. If it is
    killed there, `get` and `cleanup` of any process refuse the empty segment, and it stays until the host restarts.
    Other connectors show a message only when it is complete.

    Args:
        key: of the message, as for `get`; its sender has ended, or its request has.
    """
    if isinstance(connector, OmniBranchConnector):
        connector, key = connector.on_edge(from_stage, to_stage, key)
    if type(connector) is not SharedMemoryConnector or "/" in key:
        return False
    segment, lock = SHARED_MEMORY / key, SHARED_MEMORY / f"shm_{key}{LOCK}"
    found = [file for file in (segment, lock) if file.exists()]
    for file in found:
        file.unlink(missing_ok=True)
    if found:
        logger.info(
            "removed message %r of edge %s->%s, which a killed sender had begun", key[:80], from_stage, to_stage
        )
    return bool(found)
