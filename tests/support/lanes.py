"""Provide what tests of lanes share: work that does what its payload says, and its reports."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.lanes import Done, Lane

Work = Callable[[Any, Callable[[], None]], Any]
LONG = 20.0  # seconds nobody should ever wait
RELEASED = threading.Event()
"""Ends the work ``hold`` of this process; that of a process forked from it ends with the process alone."""
OWNERS = {"value": 0}
"""State of this process, which the work ``owner's`` returns."""
HELD = mmap.mmap(-1, mmap.PAGESIZE)
"""Shared with forked processes: whether the work ``hold`` has begun, and whether it has ended."""


def work(payload: Any, pause: Callable[[], None]) -> Any:
    """Do what the payload says: ``(verb, argument)``."""
    verb, argument = payload
    if verb == "double":
        return argument * 2
    if verb == "raise":
        raise ArithmeticError(argument)
    if verb == "sleep":
        sleep_seconds(argument)
        return argument
    if verb == "hold":
        HELD[0] = True
        RELEASED.wait(LONG)
        HELD[1] = True
        return argument
    if verb == "slices":  # 50 slices of a millisecond of work each
        for _ in range(50):
            until = monotonic_seconds() + 0.001
            while monotonic_seconds() < until:
                pass
            pause()
        return argument
    if verb == "owner's":
        return OWNERS["value"]
    if verb == "pid":
        return os.getpid()
    if verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(verb)


def wait_until_held() -> None:
    """Return once the work ``hold`` has begun."""
    until = monotonic_seconds() + LONG
    while not HELD[0]:
        assert monotonic_seconds() < until, "the job does not begin"
        sleep_seconds(0.001)


def collect(lane: Lane, count: int) -> list[Done]:
    """Return the next ``count`` reports."""
    found: list[Done] = []
    until = monotonic_seconds() + LONG
    while len(found) < count and monotonic_seconds() < until:
        lane.wait(1.0)
        found += lane.poll()
    assert len(found) == count
    return found
