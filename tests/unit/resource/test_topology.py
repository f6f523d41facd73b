"""What is learned of replicas' speeds and distances."""

from __future__ import annotations

import math
from random import Random

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.pipeline.topology import Topology


def test_nothing_is_known_at_first() -> None:
    topology = Topology()
    assert topology.speed(0) == 1.0
    assert topology.distance_seconds(0, 1) == topology.distance_seconds(None, 1) == 0.0
    for _ in range(7):
        topology.observe(0, 0, 1.0, 1.0)
        topology.observe(0, 1, 1.0, 3.0)
    assert topology.speed(1) == 1.0
    assert topology.distance_seconds(0, 1) == 0.0


def test_one_replica_is_as_fast_as_itself() -> None:
    topology = Topology()
    for _ in range(20):
        topology.observe(None, 0, 1.0, 4.0)
    assert topology.speed(0) == 1.0


def test_a_slower_replica() -> None:
    topology = Topology()
    for cost in range(1, 41):
        topology.observe(None, 0, cost, cost)
        topology.observe(None, 1, cost, 4.0 * cost)
    assert topology.speed(0) == pytest.approx(2.0)
    assert topology.speed(1) == pytest.approx(0.5)


def test_speeds_are_bounded() -> None:
    topology = Topology(least=2)
    for _ in range(4):
        topology.observe(None, 0, 1.0, 1e-6)
        topology.observe(None, 1, 1.0, 1e6)
    assert (topology.speed(0), topology.speed(1)) == (8.0, 0.125)


def test_distance_is_that_of_a_pair() -> None:
    """Replica 0 is near source 0, replica 1 near source 1: each is as fast as the other."""
    topology, rng = Topology(), Random(1)
    for _ in range(200):
        for source in (0, 1):
            for replica in (0, 1):
                far = 0.5 if source != replica else 0.0
                topology.observe(source, replica, 2.0, 2.0 + far + rng.gauss(0, 0.05))
    for source in (0, 1):
        assert topology.distance_seconds(source, source) == 0.0
        assert topology.distance_seconds(source, 1 - source) == pytest.approx(0.5, abs=0.1)
    assert topology.speed(0) == pytest.approx(1.0, abs=0.05)


def test_noise_is_no_distance() -> None:
    topology, rng = Topology(), Random(2)
    for _ in range(400):
        topology.observe(0, rng.randrange(2), 1.0, rng.lognormvariate(0, 0.3))
    assert max(topology.distance_seconds(0, replica) for replica in (0, 1)) < 0.15


def test_what_has_changed_is_learned_anew() -> None:
    topology = Topology()
    for _ in range(20):
        topology.observe(0, 0, 1.0, 1.0)
        topology.observe(0, 1, 1.0, 3.0)
    assert topology.speed(1) < 1
    topology.forget(1)
    assert topology.speed(1) == 1.0
    topology.forget_source(0)
    assert topology.distance_seconds(0, 0) == 0.0
    for _ in range(200):
        topology.observe(0, 1, 1.0, 1.0)
        topology.observe(0, 0, 1.0, 1.0)
    assert topology.speed(1) == pytest.approx(1.0, abs=0.01)


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="rate"):
        Topology(rate=0)
    with pytest.raises(ConfigError, match="least"):
        Topology(least=1)
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite"):
            Topology().observe(0, 0, bad, 1.0)
    topology = Topology(least=2)
    topology.observe(0, 0, 0.0, 1.0)  # no estimate: nothing is learned
    assert topology._ratios == {}


def test_speeds_and_distances_are_those_of_a_look_at_all() -> None:
    rng, known = Random(3), Topology(least=3)
    ratios: dict[int, list[float]] = {}
    late: dict[int, dict[int, list[float]]] = {}

    def mean(values: list[float]) -> float:
        found = 0.0
        for count, value in enumerate(values, 1):
            found += max(1 / count, 0.05) * (value - found)
        return found

    for _ in range(400):
        source, replica, seconds = rng.randrange(2), rng.randrange(4), rng.uniform(0.5, 2.0)
        known.observe(source, replica, 1.0, seconds)
        ratios.setdefault(replica, []).append(math.log(1.0 / seconds))
        late.setdefault(source, {}).setdefault(replica, []).append(seconds - 1.0 / known.speed(replica))
        if rng.random() < 0.02:
            known.forget(replica)
            ratios.pop(replica)
            for one in late.values():
                one.pop(replica, None)
        counts = {one: mean(values) for one, values in ratios.items() if len(values) >= 3}
        for one, value in counts.items():
            expected = 1.0 if len(counts) < 2 else math.exp(value - sum(counts.values()) / len(counts))
            assert known.speed(one) == pytest.approx(expected)
        for of, each in late.items():
            means = {one: mean(values) for one, values in each.items() if len(values) >= 3}
            distances = dict(known.distances(of))
            assert distances == {one: known.distance_seconds(of, one) for one in distances}
            for one, seconds in distances.items():
                assert seconds == pytest.approx(means[one] - min(means.values()))
