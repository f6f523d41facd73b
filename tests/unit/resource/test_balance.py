"""Load balancing: the rules as a table, and what they gain on a skewed trace, by decisions alone."""

import math
import random

import pytest

from vllm_omni_sched.resource.pipeline.balance import (
    NOBODY,
    CostBalancer,
    LeastQueue,
    PickReason,
    RoundRobin,
)
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState

DICE = random.Random(0)
ALL = (CostBalancer, RoundRobin, LeastQueue)


def at(replica_id, remaining=0.0, **more):
    return ReplicaState(replica_id, remaining, **more)


@pytest.mark.parametrize(
    ("replicas", "chosen", "reason", "finish"),
    [
        ([at(0, 5)], 0, "only", 6),
        ([at(0, 0, healthy=False), at(1, 5)], 1, "only", 6),
        ([at(0, 5), at(1, 3)], 1, "least_work", 4),
        # speed counts for what waits there and for the request
        ([at(0, 5, speed=3), at(1, 3)], 0, "least_work", 2),
        # rule 1: distance
        ([at(0, 2), at(1, 1.5, distance_seconds=1)], 0, "near", 3),
        ([at(0, 2), at(1, 1, distance_seconds=0.5)], 1, "least_work", 2.5),
        # rule 1: a cache saves half of the cost
        ([at(0, 2), at(1, 2.2, warm=1)], 1, "warm", 2.7),
        # rule 2: a tenth later at most
        ([at(0, 9), at(1, 10.5, warm=1)], 1, "warm", 11),
        ([at(0, 9), at(1, 10.6, warm=1)], 0, "least_work", 10),
        ([at(0, 9), at(1, 9.4, warm=0.5), at(2, 9.8, warm=0.9)], 2, "warm", 10.35),
        # rule 3: ties
        ([at(0, 1, in_flight=2, limit=2), at(1, 1, in_flight=2)], 1, "least_work", 2),
        ([at(0, 1, in_flight=2), at(1, 1, in_flight=1)], 1, "least_work", 2),
        ([at(2, 1), at(1, 1)], 1, "least_work", 2),
    ],
)
def test_cost_balancer(replicas, chosen, reason, finish):
    pick = CostBalancer().pick(1.0, replicas, DICE)
    assert (pick.replica_id, pick.reason.value, pick.finish_seconds) == (chosen, reason, pytest.approx(finish))


@pytest.mark.parametrize(
    ("saved", "chosen", "reason", "finish"),
    [
        (None, 1, "warm", 2.7),  # not known: half of the cost
        ({1: 0.3}, 1, "warm", 2.9),
        ({1: 0.1}, 0, "least_work", 3.0),
        ({}, 0, "least_work", 3.0),
        ({1: 5.0}, 1, "warm", 2.2),  # at most the cost: what waits there still takes its time
    ],
)
def test_a_known_saving_counts_in_place_of_a_fraction_of_the_cost(saved, chosen, reason, finish):
    replicas = [at(0, 2), at(1, 2.2, warm=1)]
    pick = CostBalancer(affinity_slack=0).pick(1.0, replicas, DICE, saved_seconds=saved)
    assert (pick.replica_id, pick.reason.value, pick.finish_seconds) == (chosen, reason, pytest.approx(finish))


@pytest.mark.parametrize("make", ALL)
def test_nobody_is_picked_where_nobody_is_healthy(make):
    assert make().pick(1.0, [], DICE) == NOBODY
    assert make().pick(1.0, [at(0, healthy=False), at(1, healthy=False)], DICE) == NOBODY


def test_round_robin_goes_round_those_that_are_healthy():
    balancer, replicas = RoundRobin(), [at(0), at(1), at(3)]
    assert [balancer.pick(1, replicas, DICE).replica_id for _ in range(4)] == [0, 1, 3, 0]
    replicas[1] = replicas[1]._replace(healthy=False)
    assert [balancer.pick(1, replicas, DICE).replica_id for _ in range(2)] == [3, 0]
    assert balancer.pick(1, [at(0), at(1)], DICE).reason is PickReason.TURN


def test_least_queue_counts_requests():
    queues = [at(0, 0.1, in_flight=3), at(1, 9, in_flight=2)]
    assert LeastQueue().pick(1, queues, DICE).replica_id == 1


def makespan(balancer, sizes):
    """When the last of two replicas is done, if all ``sizes`` arrive at once and each is worked off in turn."""
    replicas, rng = [at(0), at(1)], random.Random(0)
    for size in sizes:
        chosen = balancer.pick(size, replicas, rng).replica_id
        one = replicas[chosen]
        replicas[chosen] = one._replace(remaining_seconds=one.remaining_seconds + size, in_flight=one.in_flight + 1)
    return max(one.remaining_seconds for one in replicas)


def skewed(seed, number=24):
    """Draw Pareto sizes (a = 2); one request in seven is of a heavy client and asks 16 times as much."""
    rng = random.Random(seed)
    return [(16 if rng.random() < 0.15 else 1) * rng.paretovariate(2) for _ in range(number)]


def test_by_cost_the_last_is_done_in_085_of_round_robin_on_a_skewed_trace():
    traces = [skewed(seed) for seed in range(60)]
    ours, turns, queues = (
        sum(makespan(make(), trace) / sum(trace) for trace in traces) for make in (CostBalancer, RoundRobin, LeastQueue)
    )
    assert ours <= 0.85 * turns
    assert ours < queues


def test_bad_input_is_refused_by_name():
    for name in ("remaining_seconds", "in_flight", "limit", "distance_seconds", "speed", "warm"):
        with pytest.raises(ValueError, match=name):
            ReplicaState(0, **{"remaining_seconds": 0.0, name: -1})
    for cost in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="cost_seconds"):
            CostBalancer().pick(cost, [at(0)], DICE)
    for saved in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="replica 0: saved_seconds"):
            CostBalancer().pick(1.0, [at(0)], DICE, saved_seconds={0: saved})
    with pytest.raises(ValueError, match="own id"):
        CostBalancer().pick(1, [at(0), at(0)], DICE)
