"""Balancing over a few replicas that are drawn: who is looked at, who is taken, and what two choices gain."""

import random
from collections import Counter

import pytest

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.balance import NOBODY, CostBalancer, LeastQueue, PickReason, ReplicaState
from vllm_omni_sched.resource.sampled import LazyReplicas, SampledBalancer


def pool(count, looked=None, sick=(), **more):
    def describe(index):
        if looked is not None:
            looked.append(index)
        return ReplicaState(index, float(index), healthy=index not in sick, **more)

    return LazyReplicas(count, describe)


@pytest.mark.parametrize("choices", [2, 3, 5])
def test_only_those_drawn_are_looked_at_and_the_best_of_them_is_taken(choices):
    dice = random.Random(1)
    for _ in range(50):
        looked = []
        pick = SampledBalancer(choices=choices).pick(1.0, pool(10_000, looked), dice)
        assert len(set(looked)) == len(looked) == choices
        assert (pick.replica_id, pick.reason) == (min(looked), PickReason.LEAST_WORK)
        assert pick.finish_seconds == min(looked) + 1.0


def test_with_no_more_replicas_than_choices_it_is_the_balancer_itself():
    dice = random.Random(2)
    for seed in range(50):
        load = random.Random(seed)
        replicas = [ReplicaState(i, load.random(), warm=load.random(), speed=1 + load.random()) for i in range(4)]
        assert SampledBalancer(choices=4).pick(0.3, replicas, dice) == CostBalancer().pick(0.3, replicas, dice)


def test_a_sick_one_is_no_choice():
    dice, sick = random.Random(3), set(range(98))
    picks = {SampledBalancer().pick(1.0, pool(100, sick=sick), dice).replica_id for _ in range(20)}
    assert picks == {98}, "both that are well are found each time"
    one_left = SampledBalancer().pick(1.0, pool(9, sick=set(range(8))), dice)
    assert (one_left.replica_id, one_left.reason) == (8, PickReason.ONLY)
    assert SampledBalancer().pick(1.0, pool(9, sick=set(range(9))), dice) == NOBODY
    assert SampledBalancer().pick(1.0, pool(0), dice) == NOBODY


def test_each_is_drawn_as_often_as_any_other():
    dice, seen = random.Random(4), Counter()
    for _ in range(6000):
        looked = []
        SampledBalancer(choices=3).pick(1.0, pool(10, looked), dice)
        seen.update(looked)
    assert len(seen) == 10
    assert max(seen.values()) - min(seen.values()) < 250  # of 1,800 each; the deviation is 36


def test_two_choices_have_much_shorter_queues_than_chance():
    def longest(choose):
        queues, dice = [0] * 1000, random.Random(5)
        for _ in range(1000):
            queues[choose(queues, dice)] += 1
        return max(queues)

    def of_two(queues, dice):
        replicas = LazyReplicas(1000, lambda i: ReplicaState(i, in_flight=queues[i]))
        return SampledBalancer(LeastQueue()).pick(0.0, replicas, dice).replica_id

    assert longest(of_two) <= 3 < 5 <= longest(lambda queues, dice: int(dice.random() * 1000))


def test_lazy_replicas_are_a_sequence():
    looked = []
    replicas = pool(5, looked)
    assert [one.replica_id for one in replicas[1:4]] == [1, 2, 3]
    assert (replicas[-1].replica_id, len(replicas), looked) == (4, 5, [1, 2, 3, 4])
    with pytest.raises(IndexError):
        replicas[5]


def test_one_choice_is_refused():
    with pytest.raises(ConfigError, match="choices"):
        SampledBalancer(choices=1)
