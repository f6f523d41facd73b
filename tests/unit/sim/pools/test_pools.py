"""Rules of the pools, one by one; and that the policies are the real ones."""

from __future__ import annotations

import random

import pytest

from tests.support.pools import one_second, request, run
from vllm_omni_sched.config.stage_yaml import read_stage_options
from vllm_omni_sched.core.pipeline.stage import StageScheduler
from vllm_omni_sched.graph.affinity import AffinityBook
from vllm_omni_sched.graph.merging import Merger
from vllm_omni_sched.graph.order import WaitingOrder
from vllm_omni_sched.graph.path_order import PathOrder
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.monitor.forecast.load import ForecastOptions, LoadForecast
from vllm_omni_sched.monitor.forecast.plan import ReplicaPlanner
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.pipeline.balance import (
    CHOICES,
    LOOK_AT_ALL,
    CostBalancer,
    LeastQueue,
    RoundRobin,
)
from vllm_omni_sched.resource.pipeline.credits import Credits
from vllm_omni_sched.resource.pipeline.replica_speeds import ReplicaSpeeds
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_cost import StageCosts
from vllm_omni_sched.resource.pipeline.stage_gate import StageGate
from vllm_omni_sched.resource.pipeline.stage_limits import ProgressiveWindow
from vllm_omni_sched.resource.pipeline.work_left import WorkLeft
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.autoscale import ForecastScaler
from vllm_omni_sched.sim.pools.gated import GatedPool, Orchestration
from vllm_omni_sched.sim.pools.pipeline import Pipeline
from vllm_omni_sched.sim.pools.pool import BalancerChooser, Replica, RoundRobinChooser, StageSpec
from vllm_omni_sched.sim.scenario.scenario import Autoscale, Failures

pytestmark = pytest.mark.usefixtures("validated_core")


def test_the_policies_are_the_real_ones():
    sim = Simulator()
    specs = [StageSpec("encoder"), StageSpec("llm", StageKind.AR, replicas=2)]
    options = {
        "latency_target": "50ms",
        "batching": {"progressive": {"enabled": True}},
        "runtime": {"credits": {"enabled": True}},
    }
    config = read_stage_options(options, "here")
    orchestration = Orchestration(sim, config, specs, [(0, 1), (1,)], random.Random(1))
    pools = [GatedPool(sim, stage, spec, one_second(sim), orchestration) for stage, spec in enumerate(specs)]
    pipeline = Pipeline(sim, pools, [], print, {"": (0, 1)}, orchestration)
    pool = pools[1]
    assert pool.scheduler.__class__ is StageScheduler
    assert pool.scheduler.gate.__class__ is StageGate
    assert pool.scheduler.gate.balancer.__class__ is CostBalancer
    assert pool.scheduler.merger.__class__ is Merger
    assert pool.scheduler.speeds.__class__ is ReplicaSpeeds
    assert pool.scheduler.replicas[0].load.control.__class__ is PidBatch
    assert pool.scheduler.replicas[0].load.window.__class__ is ProgressiveWindow
    assert orchestration.context.costs.__class__ is StageCosts
    assert orchestration.context.order.__class__ is PathOrder
    assert orchestration.context.credits.__class__ is Credits
    assert orchestration.context.affinity[0].__class__ is AffinityBook
    assert orchestration.core.recovery.policy.__class__ is Recovery
    ahead = ForecastScaler(pipeline, {1: Autoscale(stage="llm", maximum=64)}, ForecastOptions())
    assert ahead.forecast.__class__ is LoadForecast
    assert ahead.planner.__class__ is ReplicaPlanner


def test_in_turn_picks_what_round_robin_picks():
    rng, ours, real = random.Random(4), RoundRobinChooser(), RoundRobin()
    live = [Replica(index, None) for index in range(9)]
    for _ in range(400):
        if rng.random() < 0.3 and len(live) > 1:
            live.remove(rng.choice(live))
        if rng.random() < 0.3:
            live = [Replica(i, None) for i in sorted({one.index for one in live} | {rng.randrange(12)})]
        wanted = real.pick(0.0, [ReplicaState(one.index) for one in live], rng).replica_id
        assert ours.choose(0.0, live, 0.0).index == wanted


def test_of_a_sample_the_balancer_picks():
    live = [Replica(index, None) for index in range(50)]
    for one in live:
        one.in_flight = one.index
    chooser = BalancerChooser(LeastQueue(), random.Random(2))
    assert chooser.choose(0.0, live[:LOOK_AT_ALL], 0.0).index == 0
    found = {chooser.choose(0.0, live, 0.0).index for _ in range(200)}
    assert len(found) > 10
    assert not found & {47, 48, 49}  # the fullest of four is never taken


def test_replicas_that_are_not_drawn_are_not_described():
    described = []

    class Told(WorkLeft):
        def remaining_seconds(self, now):
            described.append(self)
            return 0.0

    live = [Replica(index, None, Told()) for index in range(1000)]
    chosen = BalancerChooser(CostBalancer(), random.Random(3)).choose(1.0, live, 0.0)
    assert len(described) == CHOICES
    assert chosen.load in described


def test_a_gate_looks_at_a_few_of_many_replicas_as_in_serving(monkeypatch):
    looks = []
    plain = WorkLeft.remaining_seconds
    monkeypatch.setattr(WorkLeft, "remaining_seconds", lambda load, now: looks.append(load) or plain(load, now))
    spec = {"at_once": 1}
    options = {"graph": {"merging": {"enabled": False}, "affinity": {"enabled": False}}}

    def most_looks(replicas, options, content=None):
        """At one time, at which one request comes."""
        looks.clear()
        counts, come = [], [request(n, at=(n + 1) * 0.05, content=content) for n in range(300)]

        def watch(pipeline):
            for one in come:
                pipeline.sim.at(one.arrival - 0.005, lambda _: (counts.append(len(looks)), looks.clear()))

        records, pipeline = run(come, [StageSpec("llm", replicas=replicas, **spec)], options=options, before=watch)
        assert len(records) == 300
        assert pipeline.pools[0].present == 0
        return max(counts[1:])

    assert most_looks(LOOK_AT_ALL, options) > CHOICES
    assert most_looks(LOOK_AT_ALL + 1, options) <= 2 * CHOICES
    assert most_looks(400, options) == CHOICES
    warm = {"graph": {"merging": {"enabled": False}}}
    assert CHOICES < most_looks(400, warm, content=7) <= 2 * CHOICES


def test_of_many_replicas_each_is_found_when_it_has_room():
    options = {"graph": {"merging": {"enabled": False}, "affinity": {"enabled": False}}}
    specs = [StageSpec("llm", replicas=50, at_once=1)]
    records, _ = run([request(n) for n in range(100)], specs, options=options)
    assert sorted(one.end for one in records.values()) == [1.0] * 50 + [2.0] * 50


def test_many_replicas_that_leave_get_nothing():
    options = {"graph": {"merging": {"enabled": False}, "affinity": {"enabled": False}}}
    come = [request(n, at=0.5 + 0.1 * n) for n in range(60)]

    def scale(pipeline):
        pipeline.sim.at(0.1, lambda _: pipeline.scale(pipeline.pools[0], 34))

    records, pipeline = run(come, [StageSpec("llm", replicas=60, at_once=1)], options=options, before=scale)
    assert [records[n].end for n in range(60)] == pytest.approx([1.5 + 0.1 * n for n in range(60)])
    assert pipeline.pools[0].held == 34


def test_modalities_go_their_own_ways():
    specs = [StageSpec("encoder"), StageSpec("llm")]
    records, pipeline = run([request(0), request(1, content=5)], specs, {"": (1,), "image": (0, 1)})
    assert [records[n].end for n in (0, 1)] == [1.0, 2.0]
    assert [pool.done_requests for pool in pipeline.pools] == [1, 2]
    assert [pool.busy_seconds() for pool in pipeline.pools] == [{"serve": 1.0}, {"serve": 2.0}]


def test_identical_work_runs_once():
    specs = [StageSpec("encoder"), StageSpec("llm", replicas=9)]
    come = [request(number, content=7) for number in range(3)] + [request(3, content=8)]
    records, pipeline = run(come, specs, options={"graph": {"affinity": {"enabled": False}}})
    assert pipeline.pools[0].done_requests == 2
    assert records[2].end < records[3].end
    _, alone = run(come, specs, options={"graph": {"merging": {"enabled": False}}})
    assert alone.pools[0].done_requests == 4


def test_when_who_leads_leaves_its_follower_has_the_work():
    specs = [StageSpec("encoder")]
    records, pipeline = run(
        [request(0, content=7), request(1, content=7)],
        specs,
        options={},
        before=lambda pipeline: pipeline.sim.at(0.5, pipeline.abort, 0),
    )
    assert records[0].outcome == "failed"
    assert records[1].end == 1.0  # not begun anew
    assert pipeline.pools[0].done_requests == 1


def test_a_stage_starts_only_what_the_next_one_has_room_for():
    specs = [StageSpec("encoder", replicas=8), StageSpec("llm", at_once=1)]
    options = {"runtime": {"credits": {"enabled": True, "capacity": 2}}}
    held = []

    def look(pipeline):
        encoder = pipeline.pools[0].scheduler

        def count(_):
            held.append(sum(pool.present for pool in pipeline.pools) - len(encoder.waiting))

        for tick in range(12):
            pipeline.sim.at(tick + 0.5, count)

    records, _ = run([request(number) for number in range(8)], specs, options=options, before=look)
    assert len(records) == 8
    assert max(held) == 2


def test_urgent_ones_go_first():
    specs = [StageSpec("llm", at_once=1)]
    come = [request(0), request(1, sla="batch"), request(2, sla="realtime")]
    options = {"graph": {"priority": {"min_low_share": 0.0}}}
    records, _ = run(come, specs, options=options)
    assert [records[n].end for n in range(3)] == [1.0, 3.0, 2.0]
    records, _ = run(come, specs)
    assert [records[n].end for n in range(3)] == [1.0, 2.0, 3.0]


def test_without_classes_they_go_as_they_came():
    specs = [StageSpec("llm", at_once=1)]
    come = [request(0), request(1, sla="batch"), request(2, sla="realtime")]
    records, _ = run(come, specs, options={"graph": {"priority": {"enabled": False}}})
    assert [records[n].end for n in range(3)] == [1.0, 2.0, 3.0]


def test_a_release_does_not_look_at_all_who_wait(monkeypatch):
    looked, key = [], WaitingOrder.key

    def counted(self, waiting, now):
        looked.append(waiting)
        return key(self, waiting, now)

    monkeypatch.setattr(WaitingOrder, "key", counted)
    records, _ = run([request(number) for number in range(300)], [StageSpec("llm", at_once=1)], options={})
    assert len(records) == 300
    assert len(looked) < 4 * 300  # when it comes, is late, and has aged


def test_a_request_that_lost_its_place_goes_on_in_the_same_stage():
    specs = [StageSpec("encoder"), StageSpec("llm")]
    spec = Failures(stage="llm", at_seconds=(1.5,), restart_seconds=1.0, detection_seconds=1.0)
    records, pipeline = run(
        [request(0)],
        specs,
        options={},
        before=lambda pipeline: pipeline.fail_by(1, spec, random.Random(1)),
    )
    assert records[0].end == 4.5  # restarted at 3.5
    assert records[0].outcome == "done"
    assert records[0].attempts == 2
    assert pipeline.pools[0].done_requests == 1


def test_stock_requests_fail_with_their_replica_and_it_comes_back_only_if_told():
    spec = Failures(stage="llm", at_seconds=(0.5,), restart_seconds=1.0, detection_seconds=1.0)
    come = [request(0), request(1, at=1.0), request(2, at=2.0), request(3, at=3.0)]
    for respawn, outcomes in ((False, ["failed"] * 4), (True, ["failed", "failed", "failed", "done"])):
        records, pipeline = run(
            come,
            [StageSpec("llm")],
            respawn=respawn,
            before=lambda pipeline: pipeline.fail_by(0, spec, random.Random(1)),
        )
        assert [records[number].outcome for number in range(4)] == outcomes
        assert pipeline.pools[0].busy_seconds()["serve"] == (1.5 if respawn else 0.5)
