"""Random load, failures and aborts: each request leaves once, whatever breaks; with recovery nobody is lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.graph.flow import FlowPlan
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.pipeline.balance import CostBalancer, LeastQueue
from vllm_omni_sched.resource.pipeline.stage_cost import StageCosts
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Outcome
from vllm_omni_sched.sim.pools.gated import GatedPool, Orchestration
from vllm_omni_sched.sim.pools.pipeline import Links, Pipeline
from vllm_omni_sched.sim.pools.pool import BalancerChooser, Pool, RoundRobinChooser, StageSpec
from vllm_omni_sched.sim.scenario.scenario import Failures
from vllm_omni_sched.sim.scenario.stages import Link
from vllm_omni_sched.sim.servers import QueueServer, SharedServer
from vllm_omni_sched.sim.work import Item, Request

pytestmark = pytest.mark.usefixtures("validated_core")

PATHS = {"": (0, 1), "text": (1,), "audio": (0, 1, 2)}
FORKS = {"": FlowPlan((0, 1, 2), {0: (), 1: (0,), 2: (0,)}, (1, 2)), "text": (1,), "audio": (0, 2)}
JOINS = {"": FlowPlan((0, 1, 2), {0: (), 1: (0,), 2: (0, 1)}, (1, 2)), "text": (1,), "audio": (0, 2)}
COUNT = 60
LONG = 5000.0  # seconds; whoever is here still is stuck


def requests(rng, rate=3.0):
    now = 0.0
    for number in range(COUNT):
        now += rng.expovariate(rate)
        modality = rng.choice(["text", "image", "video", "audio"])
        items = () if modality == "text" else (Item(modality, rng.randint(1, 400), rng.randint(0, 5)),)
        sla = rng.choice(["interactive", "batch", "realtime"])
        yield Request(number, now, rng.randint(1, 200), rng.randint(1, 50), items, sla, rng.randint(0, 3))


def specs():
    return [
        StageSpec("encoder", StageKind.GENERATION, replicas=2, at_once=4),
        StageSpec("llm", StageKind.AR, replicas=3, at_once=8, startup_seconds=5.0),
        StageSpec("vocoder", StageKind.GENERATION, replicas=2, at_once=2),
    ]


def servers(sim, seed):
    def drawn(job, rng):
        return rng.expovariate(2.0)

    def make(stage):
        rng = random.Random(seed + stage)
        kind = SharedServer if stage == 1 else lambda *given: QueueServer(given[0], given[1], 2, *given[2:])
        return lambda _, done: kind(sim, done, drawn, rng)

    return [make(stage) for stage in range(3)]


def stock(sim, seed, records, **how):
    choosers = [
        RoundRobinChooser(),
        BalancerChooser(LeastQueue(), random.Random(seed)),
        BalancerChooser(CostBalancer(), random.Random(seed)),
    ]
    costs = [None, None, StageCosts()]
    pools = [
        Pool(sim, stage, spec, make, choosers[stage], costs[stage])
        for stage, (spec, make) in enumerate(zip(specs(), servers(sim, seed), strict=True))
    ]
    return Pipeline(sim, pools, requests(random.Random(seed)), records.append, PATHS, **how)


def orchestrated(sim, seed, records, options, paths=PATHS, **how):
    orchestration = Orchestration(sim, StageSchedConfig(**options), specs(), list(paths.values()), random.Random(seed))
    pools = [
        GatedPool(sim, stage, spec, make, orchestration)
        for stage, (spec, make) in enumerate(zip(specs(), servers(sim, seed), strict=True))
    ]
    return Pipeline(sim, pools, requests(random.Random(seed)), records.append, paths, orchestration, **how)


def break_it(pipeline, rng, aborts):
    for stage in range(3):
        pipeline.fail_by(
            stage,
            Failures(
                stage="",
                every_seconds=rng.uniform(3, 20),
                rack_replicas=rng.randint(1, 2),
                kind="rack",
                restart_seconds=3.0,
            ),
            rng,
        )
    aborted = rng.sample(range(COUNT), aborts)
    for number in aborted:
        pipeline.sim.at(rng.uniform(0, 25), pipeline.abort, number)


def check(pipeline, records):
    assert sorted(record.number for record in records) == list(range(COUNT))  # each once
    assert pipeline.arrived == pipeline.done + pipeline.failed == COUNT
    assert pipeline.in_flight == 0
    assert not pipeline.active()
    for record in records:
        if record.outcome is Outcome.DONE:
            assert record.arrival <= record.first <= record.end
    for pool in pipeline.pools:
        assert pool.present == 0
        for replica in pool.replicas.values():
            assert replica.in_flight == 0
            assert replica.server is None or replica.server.in_flight == 0
            assert replica.load is None or len(replica.load) == 0
        if isinstance(pool, GatedPool):
            assert not pool.scheduler.waiting
            assert not pool.scheduler.running
            assert len(pool.scheduler.merger) == 0
    if pipeline.orchestration is not None and pipeline.orchestration.context.credits is not None:
        credits = pipeline.orchestration.context.credits
        capacity = pipeline.orchestration.config.runtime.credits.capacity
        assert [credits.free(stage) for stage in credits.order] == [capacity] * 3
    recovery = None if pipeline.orchestration is None else pipeline.orchestration.core.recovery
    if recovery is not None:
        assert len(recovery.policy) == 0
        assert not recovery.works
        assert not recovery.lost


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.booleans(), st.integers(0, 8))
def test_stock(seed, respawn, aborts):
    sim, records = Simulator(), []
    pipeline = stock(sim, seed, records, respawn=respawn)
    break_it(pipeline, random.Random(seed), aborts)
    sim.run(until=LONG)
    check(pipeline, records)


OPTIONS = st.fixed_dictionaries(
    {
        "runtime": st.sampled_from(
            [
                {},
                {"credits": {"enabled": True, "capacity": 6}},
                {"recovery": {"enabled": False}},
                {"recovery": {"restart": False}},
                {"branch_errors": "output"},
            ]
        ),
        "graph": st.sampled_from([{}, {"merging": {"enabled": False}}, {"priority": {"enabled": False}}]),
        "batching": st.sampled_from([{}, {"target_latency_ms": 200.0, "hold_ms": 200.0}]),
        "balancing": st.sampled_from([{}, {"policy": "round-robin"}]),
    }
)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), OPTIONS, st.integers(0, 8), st.booleans(), st.sampled_from([PATHS, FORKS, JOINS]))
def test_orchestrated(seed, options, aborts, linked, paths):
    sim, records = Simulator(), []
    link = Link(bytes_per_second=1e6, latency_seconds=0.01, bytes_per_embed=2048.0)
    links = {(0, 1): Links(sim, link)} if linked else {}
    pipeline = orchestrated(sim, seed, records, options, paths, links=links)
    break_it(pipeline, random.Random(seed), aborts)
    sim.run(until=LONG)
    check(pipeline, records)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([PATHS, FORKS, JOINS]))
def test_with_recovery_nobody_is_lost(seed, paths):
    """Each replica dies once, not all of a stage at a time."""
    sim, records = Simulator(), []
    options = {"runtime": {"recovery": {"max_redispatches": 20}}}
    pipeline = orchestrated(sim, seed, records, options, paths)
    rng = random.Random(seed)
    failures = [
        pipeline.fail_by(stage, Failures(stage="", at_seconds=(2.0 + stage, 12.0 + stage), restart_seconds=3.0), rng)
        for stage in range(3)
    ]
    sim.run(until=LONG)
    check(pipeline, records)
    assert [record.outcome for record in records] == [Outcome.DONE] * COUNT
    assert sum(one.deaths for one in failures) > 0
    assert all(len(pool.live) == pool.spec.replicas for pool in pipeline.pools)


def test_without_recovery_they_fail():
    sim, records = Simulator(), []
    pipeline = stock(sim, 3, records)
    pipeline.fail_by(
        1, Failures(stage="", at_seconds=(5.0,), kind="rack", rack_replicas=3, restart_seconds=60.0), random.Random(1)
    )
    sim.run(until=LONG)
    check(pipeline, records)
    assert pipeline.failed > COUNT / 4
    assert not pipeline.pools[1].live


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.booleans())
def test_scaling(seed, gated):
    sim, records = Simulator(), []
    rng = random.Random(seed)
    pipeline = orchestrated(sim, seed, records, {}) if gated else stock(sim, seed, records)
    for _ in range(6):
        sim.at(
            rng.uniform(0, 20),
            lambda wanted: pipeline.scale(pipeline.pools[1], wanted),
            rng.randint(1, 6),
        )
    sim.at(25.0, lambda _: pipeline.scale(pipeline.pools[1], 2))
    sim.run(until=LONG)
    check(pipeline, records)
    assert pipeline.failed == 0
    assert len(pipeline.pools[1].live) == pipeline.pools[1].held == 2


@pytest.mark.parametrize("gated", [False, True])
def test_the_same_seed_gives_the_same_records(gated):
    found = []
    for _ in range(2):
        sim, records = Simulator(), []
        pipeline = orchestrated(sim, 9, records, {}) if gated else stock(sim, 9, records)
        break_it(pipeline, random.Random(9), 4)
        sim.run()
        found.append(records)
    assert found[0] == found[1]
