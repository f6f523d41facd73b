"""Balancing over many replicas: who is looked at, who is taken, and what choices gain."""

import random
from collections import Counter

import pytest

from vllm_omni_sched.resource.pipeline.balance import (
    CHOICES,
    LOOK_AT_ALL,
    CostBalancer,
    LazyReplicas,
    LeastQueue,
    PickReason,
)
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState


def pool(count, looked=None, sick=(), **more):
    def describe(index):
        if looked is not None:
            looked.append(index)
        return ReplicaState(index, float(index), healthy=index not in sick, **more)

    return LazyReplicas(count, describe)


@pytest.mark.parametrize("count", [LOOK_AT_ALL + 1, 100, 1000, 10_000])
def test_only_a_few_are_looked_at_and_the_best_of_them_is_taken(count):
    rng = random.Random(1)
    for _ in range(50):
        looked = []
        pick = CostBalancer().pick(1.0, pool(count, looked), rng)
        assert len(set(looked)) == len(looked) == CHOICES
        assert (pick.replica_id, pick.reason) == (min(looked), PickReason.LEAST_WORK)
        assert pick.finish_seconds == min(looked) + 1.0


def test_a_warm_one_is_a_choice_wherever_it_is():
    rng = random.Random(2)

    def state(index):
        return ReplicaState(index, *((1.2,) if index == 7777 else (1.0,)), warm=0.9 if index == 7777 else 0.0)

    for _ in range(50):
        pick = CostBalancer().pick(1.0, LazyReplicas(10_000, state), rng, near=[7777])
        assert (pick.replica_id, pick.reason) == (7777, PickReason.WARM)


def test_each_is_drawn_as_often_as_any_other():
    rng, seen = random.Random(4), Counter()
    for _ in range(6000):
        looked = []
        CostBalancer().pick(1.0, pool(40, looked), rng)
        seen.update(looked)
    assert len(seen) == 40
    assert max(seen.values()) - min(seen.values()) < 250  # of 1,200 each; the deviation is 31


def test_choices_have_much_shorter_queues_than_chance():
    def longest(choose):
        queues, rng = [0] * 1000, random.Random(5)
        for _ in range(1000):
            queues[choose(queues, rng)] += 1
        return max(queues)

    def of_some(queues, rng):
        replicas = LazyReplicas(1000, lambda i: ReplicaState(i, in_flight=queues[i]))
        return LeastQueue().pick(0.0, replicas, rng).replica_id

    assert longest(of_some) <= 2 < 5 <= longest(lambda queues, rng: int(rng.random() * 1000))


def test_lazy_replicas_are_a_sequence():
    looked = []
    replicas = pool(5, looked)
    assert [one.replica_id for one in replicas[1:4]] == [1, 2, 3]
    assert (replicas[-1].replica_id, len(replicas), looked) == (4, 5, [1, 2, 3, 4])
    with pytest.raises(IndexError):
        replicas[5]
