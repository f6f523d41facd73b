"""Provide what tests of the arena share: a folder of its own, small options, clocks and payloads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.connectors.arena import ArenaOptions, meeting
from vllm_omni_sched.connectors.edge import Edge

KIB, MIB = 1 << 10, 1 << 20
EDGE = Edge("0", "1")
LONG = 30.0  # seconds nobody should ever wait
SHM = "/dev/shm"


@contextmanager
def place() -> Iterator[str]:
    """Make a directory in memory for arenas, and check that it is empty in the end."""
    with tempfile.TemporaryDirectory(dir=SHM if os.path.isdir(SHM) else None, prefix="arena-tests-") as root:
        yield root
        meeting.sweep(FilePath(root) / f"vllm-omni-sched-{os.geteuid()}")
        assert os.listdir(root) == []


def small(root: str, **options: Any) -> ArenaOptions:
    """Return options of an arena with a megabyte or two for each kind."""
    pool = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": 1 * MIB, "inline_bytes": 1 * KIB}
    defaults: dict[str, Any] = {
        "text": pool,
        "image": pool,
        "audio": pool,
        "ring_bytes": 64 * KIB,
        "max_messages": 1024,
    }
    return ArenaOptions.model_validate({"directory": root, "arena": "a", **defaults, **options})


class FakeClock:
    """A clock that stands still until it is told to go."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Ahead:
    """A clock that is some seconds ahead of that of all processes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return monotonic_seconds() + self.seconds


def pixels(fill: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Return a payload that goes through the pool, unless it is small enough for the ring."""
    return np.full((1, nbytes), fill, np.uint8)
