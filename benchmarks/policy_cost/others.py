"""Decisions of all other policies, each over what it grows with."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

from benchmarks.policy_cost.bench import Bench, Clock, Decision
from vllm_omni_sched.graph.merging import Merger
from vllm_omni_sched.graph.order import INTERACTIVE
from vllm_omni_sched.graph.path_order import PathOrder, PathRequest
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind
from vllm_omni_sched.monitor.forecast.load import ForecastOptions, LoadForecast
from vllm_omni_sched.monitor.forecast.plan import PoolState, ReplicaPlanner
from vllm_omni_sched.monitor.recovery.events import Dispatched, Finished, Replica
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.resource.engine.lane import DecodeLoad, EncodeShare, LaneShare
from vllm_omni_sched.resource.engine.prefill_budget import AdaptivePrefill
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.pipeline.balance import (
    LOOK_AT_ALL,
    Balancer,
    CostBalancer,
    LazyReplicas,
    LeastQueue,
)
from vllm_omni_sched.resource.pipeline.credits import Credits
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState

STAGES = ("encode", "llm", "talker", "vocoder")


def encode_share(_: int, rng: random.Random) -> Bench:
    policy, load = EncodeShare(max_alone_seconds=0.2), DecodeLoad(0.1, 0.09)
    return Bench(lambda seconds: policy.place(load, seconds), lambda: rng.uniform(0.001, 0.1))


def lane_share(_: int, rng: random.Random) -> Bench:
    policy, clock = LaneShare(), Clock()
    load = DecodeLoad(0.1, rng.uniform(0.05, 0.15))
    return Bench(lambda now: policy.update(load, now), clock)


def pick(balancer: Balancer) -> Callable[[int, random.Random], Bench]:
    """States are made for the decision, of those that are looked at, as a caller has to."""

    def laid_out(replicas: int, rng: random.Random) -> Bench:
        loads = [(rng.random() * 10, rng.randrange(32)) for _ in range(replicas)]

        def state(index: int) -> ReplicaState:
            return ReplicaState(index, *loads[index])

        seen = LazyReplicas(replicas, state)
        return Bench(lambda _: balancer.pick(0.1, seen, rng))

    return laid_out


def prefill(_: int, rng: random.Random) -> Bench:
    policy, clock = AdaptivePrefill(), Clock()
    return Bench(lambda asked: policy.observe(*asked), lambda: (rng.uniform(0.01, 0.1), clock(), rng.randrange(8192)))


def batch(_: int, rng: random.Random) -> Bench:
    policy, clock = PidBatch(interval_seconds=0.002), Clock()
    return Bench(lambda asked: policy.observe(*asked), lambda: (rng.uniform(0.01, 0.1), clock(), policy.limit))


def take_and_give_back(holders: int, rng: random.Random) -> Bench:
    after = {stage: [following] for stage, following in pairwise(STAGES)}
    policy = Credits(after, dict.fromkeys(STAGES, holders + 1))
    for i in range(holders):
        policy.take(STAGES[0], f"r{i}")

    def decide(_: object) -> None:
        policy.take(STAGES[0], "new")
        policy.give_back("new")

    return Bench(decide)


def join_and_finish(groups: int, rng: random.Random) -> Bench:
    policy = Merger()
    for i in range(groups):
        policy.join(f"work {i}", f"r{i}")

    def decide(key: str) -> None:
        policy.join(key, "new")
        policy.finish("new")

    return Bench(decide, lambda: f"more {rng.random()}")


def dispatch_and_finish(in_flight: int, rng: random.Random) -> Bench:
    replicas = [Replica(0, i) for i in range(8)]
    policy = Recovery(dict.fromkeys(replicas, float("inf")), {}, RecoveryOptions(), rng)
    for i in range(in_flight):
        policy.on_event(Dispatched(f"r{i}", replicas[i % 8]), 0.0)

    def decide(replica: Replica) -> None:
        policy.on_event(Dispatched("new", replica), 1.0)
        policy.on_event(Finished("new", 1, final=True), 2.0)

    return Bench(decide, lambda: rng.choice(replicas))


def plan_replicas(pools: int, rng: random.Random) -> Bench:
    policy, clock = ReplicaPlanner(), Clock()
    states = {f"p{i}": PoolState(rng.randint(1, 8), 2.0, rng.uniform(0, 12)) for i in range(pools)}
    return Bench(lambda now: policy.plan(states, 2, now), clock)


def at_stage(stages: int, rng: random.Random) -> Bench:
    graph = StageGraph.of(
        Stage(i, f"s{i}", StageKind.AR, (i - 1,) if i else (), final_output=i == stages - 1) for i in range(stages)
    )
    policy = PathOrder(graph)
    costs = {i: rng.random() for i in range(stages)}
    return Bench(lambda one: policy.at_stage(one, 0), lambda: PathRequest("r", 0.0, costs, INTERACTIVE))


def forecast(bins: int, rng: random.Random) -> Bench:
    policy = LoadForecast(ForecastOptions(bin_seconds=1.0, season_bins=1, horizon_seconds=10.0))
    for now in range(bins):
        policy.observe(float(now), "image", rng.randrange(10))
    return Bench(lambda _: policy.forecast(float(bins), "image"))


DECISIONS = (
    Decision("EncodeShare.place", "-", encode_share, (1,)),
    Decision("LaneShare.update", "-", lane_share, (1,)),
    Decision("CostBalancer.pick", "replicas", pick(CostBalancer()), (8, LOOK_AT_ALL, 100, 1000, 10_000)),
    Decision("LeastQueue.pick", "replicas", pick(LeastQueue()), (8, LOOK_AT_ALL, 100, 1000, 10_000)),
    Decision("AdaptivePrefill.observe", "-", prefill, (1,)),
    Decision("PidBatch.observe", "-", batch, (1,)),
    Decision("Credits.take and give_back", "holders", take_and_give_back),
    Decision("Merger.join and finish", "groups", join_and_finish),
    Decision("Recovery, dispatch and finish", "in flight", dispatch_and_finish),
    Decision("ReplicaPlanner.plan", "pools", plan_replicas, (1, 4)),
    Decision("PathOrder.at_stage", "stages", at_stage, (1, 4)),
    Decision("LoadForecast.forecast", "bins", forecast, (300,)),
)
