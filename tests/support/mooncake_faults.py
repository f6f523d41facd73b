"""Provide what tests that break a Mooncake deployment share."""

from __future__ import annotations

import time
from typing import Any

from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.mooncake import MooncakeTransport
from vllm_omni_sched.connectors.transport import Status

EDGE = Edge("0", "1")
MIB = 1 << 20
SOON = 15.0  # seconds, where nothing should take one


def put(path: MooncakeTransport, key: str, payload: Any, deadline: float | None = None) -> int:
    return path.put(make_message(EDGE, key, payload), deadline)


def stop_asking(path: MooncakeTransport) -> None:
    """Stop the thread that asks the master: it is then asked only when the test does so."""
    path._closed = True
    path._wake.set()
    path._keeper.join()
    path._closed = False


def wait_for(what: Any, seconds: float = SOON) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def is_status(path: MooncakeTransport, status: Status) -> Any:
    return lambda: path.health().status is status
