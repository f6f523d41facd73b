"""Balancing by cost: Graham's bound, and the price of affinity."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.pipeline.balance import CostBalancer, LeastQueue, RoundRobin
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState

seconds = st.floats(0, 1e4)


@settings(deadline=None, max_examples=50)
@given(st.lists(seconds, min_size=1, max_size=60), st.integers(1, 8))
def test_the_last_is_done_within_grahams_bound(sizes, m):
    replicas, rng = [ReplicaState(i) for i in range(m)], random.Random(0)
    for size in sizes:
        pick = CostBalancer().pick(size, replicas, rng)
        one = replicas[pick.replica_id]
        replicas[pick.replica_id] = one._replace(remaining_seconds=one.remaining_seconds + size)
    lower_bound = max(max(sizes), sum(sizes) / m)
    assert max(one.remaining_seconds for one in replicas) <= (2 - 1 / m) * lower_bound * (1 + 1e-9)


some = st.builds(
    ReplicaState,
    replica_id=st.integers(0, 10**6),
    remaining_seconds=seconds,
    in_flight=st.integers(0, 50),
    limit=st.integers(0, 32),
    speed=st.floats(0.1, 10),
    distance_seconds=st.floats(0, 10),
    warm=st.floats(0, 1),
    healthy=st.booleans(),
    units=st.just(0),
    units_limit=st.none(),
)
some_replicas = st.lists(some, max_size=6, unique_by=lambda one: one.replica_id)


@settings(deadline=None, max_examples=50)
@given(seconds, some_replicas, st.floats(0, 1), st.floats(0, 1), st.booleans(), st.integers(0, 2**32))
def test_affinity_costs_at_most_its_slack_and_order_does_not_matter(cost, replicas, share, slack, known, seed):
    rng = random.Random(seed)
    balancer = CostBalancer(share, slack)
    saved = {one.replica_id: rng.uniform(0, 2 * cost) for one in replicas if one.warm} if known else None
    pick = balancer.pick(cost, replicas, rng, (), saved)
    healthy = {one.replica_id: balancer.finish_seconds(cost, one, saved) for one in replicas if one.healthy}
    if not healthy:
        assert pick.replica_id is None
        return
    assert pick.finish_seconds == healthy[pick.replica_id] <= min(healthy.values()) * (1 + slack)
    shuffled = list(replicas)
    rng.shuffle(shuffled)
    assert balancer.pick(cost, shuffled, rng, (), saved) == pick


@settings(deadline=None, max_examples=50)
@given(seconds, some, seconds, seconds)
def test_a_request_ends_sooner_by_its_saving_and_never_before_the_work_that_waits(cost, replica, saved, more):
    balancer, name = CostBalancer(), replica.replica_id
    without, less, most = (balancer.finish_seconds(cost, replica, {name: one}) for one in (0.0, saved, saved + more))
    assert without >= less >= most >= balancer.finish_seconds(0.0, replica, {})
    assert without == LeastQueue().finish_seconds(cost, replica)
    assert without - less <= saved / replica.speed * (1 + 1e-9) + 1e-9 * without
    assert balancer.finish_seconds(cost, replica, {name + 1: saved}) == without


@settings(deadline=None, max_examples=50)
@given(seconds, some_replicas, st.integers(0, 2**32))
def test_a_sick_replica_is_never_picked(cost, replicas, seed):
    rng = random.Random(seed)
    healthy = {one.replica_id for one in replicas if one.healthy} or {None}
    for balancer in (CostBalancer(), RoundRobin(), LeastQueue()):
        assert all(balancer.pick(cost, replicas, rng).replica_id in healthy for _ in range(3))
