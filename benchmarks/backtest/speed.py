"""Measure how fast the machine is just now: a shared one is not always as fast, and no calibration can know that."""

from __future__ import annotations

import statistics
import time

import numpy as np

ROUNDS = 15
SIDE, BYTES = 1024, 1 << 28


def reference_seconds(rounds: int = ROUNDS) -> float:
    """Return the median seconds of a fixed piece of work on all processors.

    As an engine's steps, it multiplies matrices, and reads memory that no cache holds.
    """
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((SIDE, SIDE), dtype=np.float32) for _ in range(2))
    memory = np.ones(BYTES // 4, dtype=np.float32)
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(4):
            np.matmul(left, right)
        memory.sum()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def slower(calibration: list[float], replays: list[float]) -> float:
    """Return how many times as long the reference took around the replays as around the calibration."""
    return statistics.median(replays) / statistics.median(calibration)
