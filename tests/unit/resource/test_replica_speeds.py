"""Check what the scheduler learns of replicas' speeds."""

from __future__ import annotations

import math
from random import Random

import pytest

from vllm_omni_sched.resource.pipeline.replica_speeds import LEAST, RATE, ReplicaSpeeds


def test_nothing_is_known_at_first() -> None:
    speeds = ReplicaSpeeds()
    assert speeds.speed(0) == 1.0
    for _ in range(LEAST - 1):
        speeds.observe(0, 1.0, 1.0)
        speeds.observe(1, 1.0, 3.0)
    assert speeds.speed(1) == 1.0


def test_a_slower_replica() -> None:
    speeds = ReplicaSpeeds()
    for cost in range(1, 41):
        speeds.observe(0, cost, cost)
        speeds.observe(1, cost, 4.0 * cost)
    assert speeds.speed(0) == pytest.approx(2.0)
    assert speeds.speed(1) == pytest.approx(0.5)


def test_speeds_are_bounded() -> None:
    speeds = ReplicaSpeeds()
    for _ in range(LEAST):
        speeds.observe(0, 1.0, 1e-6)
        speeds.observe(1, 1.0, 1e6)
    assert (speeds.speed(0), speeds.speed(1)) == (8.0, 0.125)


def test_what_has_changed_is_learned_anew() -> None:
    speeds = ReplicaSpeeds()
    for _ in range(20):
        speeds.observe(0, 1.0, 1.0)
        speeds.observe(1, 1.0, 3.0)
    assert speeds.speed(1) < 1
    speeds.forget(1)
    assert speeds.speed(1) == 1.0
    for _ in range(200):
        speeds.observe(1, 1.0, 1.0)
        speeds.observe(0, 1.0, 1.0)
    assert speeds.speed(1) == pytest.approx(1.0, abs=0.01)


def test_speeds_are_those_of_a_look_at_all() -> None:
    rng, known = Random(3), ReplicaSpeeds()
    ratios: dict[int, list[float]] = {}

    def mean(values: list[float]) -> float:
        found = 0.0
        for count, value in enumerate(values, 1):
            found += max(1 / count, RATE) * (value - found)
        return found

    for _ in range(400):
        replica, seconds = rng.randrange(4), rng.uniform(0.5, 2.0)
        known.observe(replica, 1.0, seconds)
        ratios.setdefault(replica, []).append(math.log(1.0 / seconds))
        if rng.random() < 0.02:
            known.forget(replica)
            ratios.pop(replica)
        counts = {one: mean(values) for one, values in ratios.items() if len(values) >= LEAST}
        for one, value in counts.items():
            expected = 1.0 if len(counts) < 2 else math.exp(value - sum(counts.values()) / len(counts))
            assert known.speed(one) == pytest.approx(expected)
