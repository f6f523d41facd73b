"""Sender or receiver of `benchmarks.connectors`, in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from mmap import MAP_SHARED, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm_omni

from benchmarks.connectors import VARIANTS
from benchmarks.harness.child import emit
from vllm_omni_sched.connector_names import ARENA_VARIABLE

WARM_UP = 5


def main() -> None:
    role, taken = sys.argv[1], Path(sys.argv[2])
    with taken.open("r+b") as file:
        page = mmap(file.fileno(), 8, MAP_SHARED)
    counter = ctypes.c_int64.from_buffer(page)  # messages that the receiver has got
    connectors = {variant: make(variant, name, extra) for variant, (name, extra) in VARIANTS.items()}
    emit("ready", vllm_omni=vllm_omni.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        connector = connectors[request["variant"]]
        run = {"sender": send, "receiver": receive, "holder": hold}[request.get("do", role)]
        emit("done", **run(connector, counter, **{k: v for k, v in request.items() if k not in ("variant", "do")}))
    for connector in connectors.values():
        connector.close()


def make(variant: str, name: str, extra: dict[str, Any]) -> Any:
    """Make one connector; ours of two variants are in arenas of their own, and do not see each other."""
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

    from vllm_omni_sched.plugin import register

    register()
    if name == "ArenaConnector":
        extra = {**extra, "arena": f"{os.environ[ARENA_VARIABLE]}-{variant.replace(' ', '-')}"}
    return OmniConnectorFactory.create_connector(ConnectorSpec(name, {"stage_id": 0, **extra}))


def payload(nbytes: int) -> dict[str, Any]:
    states = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(torch.bfloat16).reshape(-1, 64)
    return {"hidden_states": {"output": states}, "meta": {"finished": torch.tensor(False)}}


def send(connector: Any, counter: ctypes.c_int64, nbytes: int, messages: int, label: str) -> dict[str, Any]:
    sent, begun, ended = payload(nbytes), [], []
    start = counter.value
    for i in range(WARM_UP + messages):
        time.sleep(1e-4)  # the receiver is looking for it already
        begun.append(time.monotonic())
        assert connector.put("0", "1", f"{label}_{i}", sent)[0]
        ended.append(time.monotonic())
        while counter.value == start + i:
            pass
    return {"begun": begun[WARM_UP:], "ended": ended[WARM_UP:], "memcpy": copy_seconds(nbytes)}


def receive(connector: Any, counter: ctypes.c_int64, nbytes: int, messages: int, label: str) -> dict[str, Any]:
    got, took = [], []
    for i in range(WARM_UP + messages):
        while True:
            asked = time.monotonic()
            found = connector.get("0", "1", f"{label}_{i}")
            if found is not None:
                break
        got.append(time.monotonic())
        took.append(got[-1] - asked)
        states = found[0]["hidden_states"]["output"]
        assert states.numel() * 2 == nbytes
        del found, states
        counter.value += 1
    return {"got": got[WARM_UP:], "took": took[WARM_UP:]}


def hold(connector: Any, counter: ctypes.c_int64, nbytes: int, messages: int, label: str) -> dict[str, Any]:
    """Bytes of shared memory that messages take which nobody has got."""
    sent, before = payload(nbytes), shared_bytes(connector)
    for i in range(messages):
        assert connector.put("0", "1", f"{label}_{i}", sent)[0]
    after = shared_bytes(connector)
    for i in range(messages):
        connector.cleanup(f"{label}_{i}")
    return {"held_per_byte": (after - before) / (nbytes * messages)}


def shared_bytes(connector: Any) -> int:
    """Return the bytes in use now: those allocated in an arena, or the existing segments."""
    facts = connector.health()
    if "ring" in facts:
        return int(facts["ring"]["used_bytes"] + sum(pool["used_bytes"] for pool in facts["pools"].values()))
    return sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").iterdir() if path.is_file())


def copy_seconds(nbytes: int) -> float:
    """Time a memcpy between memory that was touched before: the median of several."""
    source, target, took = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8), []
    for _ in range(9):
        start = time.monotonic()
        np.copyto(target, source)
        took.append(time.monotonic() - start)
    return sorted(took)[4]


if __name__ == "__main__":
    main()
