"""Simulated stages that branch: times of forks and joins, links, deaths, and errors of one branch."""

from __future__ import annotations

import random

import pytest

from tests.support.pools import request, run
from vllm_omni_sched.graph.flow import FlowPlan
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.sim.measure import Outcome
from vllm_omni_sched.sim.pools.pipeline import Links
from vllm_omni_sched.sim.pools.pool import StageSpec
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load
from vllm_omni_sched.sim.scenario.scenario import Failures
from vllm_omni_sched.sim.scenario.stages import Link

pytestmark = pytest.mark.usefixtures("validated_core")

FORK = FlowPlan((0, 1, 2), {0: (), 1: (0,), 2: (0,)}, (1, 2))
LONG_FORK = FlowPlan((0, 1, 2, 3), {0: (), 1: (0,), 2: (0,), 3: (2,)}, (1, 3))
DIAMOND = FlowPlan((0, 1, 2, 3), {0: (), 1: (0,), 2: (0,), 3: (1, 2)}, (3,))

either = pytest.mark.parametrize("options", [None, {}], ids=["stock", "orchestrated"])


def specs(count, replicas=1):
    kinds = [StageKind.GENERATION, StageKind.AR, StageKind.GENERATION, StageKind.DIFFUSION]
    return [StageSpec(f"s{at}", kinds[at], replicas=replicas, at_once=1) for at in range(count)]


@either
@pytest.mark.parametrize(("plan", "ends"), [(FORK, 2.0), (LONG_FORK, 3.0), (DIAMOND, 3.0)])
def test_branches_run_at_a_time(options, plan, ends):
    records, pipeline = run([request(0)], specs(len(plan.stages)), {"": plan}, options)
    assert records[0].end == ends
    assert [pool.done_requests for pool in pipeline.pools] == [1] * len(plan.stages)


@either
def test_a_join_waits_for_the_slower_link(options):
    def slow(sim):
        return Links(sim, Link(latency_seconds=5.0))

    records, _ = run([request(0)], specs(4), {"": DIAMOND}, options, links={(1, 3): slow, (0, 2): slow})
    assert records[0].end == 1 + 5 + 1 + 1  # stage 1's output is on its way until 7, as stage 2 ends then
    records, _ = run([request(0)], specs(4), {"": DIAMOND}, options, links={(1, 3): slow})
    assert records[0].end == 1 + 1 + 5 + 1


@either
def test_modalities_take_their_own_branches(options):
    paths = {"": FORK, "audio": FlowPlan((0, 2), {0: (), 2: (0,)}, (2,))}
    records, pipeline = run(
        [request(0, content=1, modality="audio"), request(1, at=10.0, content=2)], specs(3), paths, options
    )
    assert [records[number].end for number in range(2)] == [2.0, 12.0]
    assert [pool.done_requests for pool in pipeline.pools] == [2, 1, 2]


def test_identical_work_runs_once_in_each_stage():
    requests = [request(number, content=7) for number in range(3)]
    records, pipeline = run(requests, specs(3), {"": FORK}, {})
    assert {record.outcome for record in records.values()} == {Outcome.DONE}
    assert [pool.done_requests for pool in pipeline.pools] == [1, 3, 1]  # an LLM's prompts are not known to be equal


def test_a_death_in_one_branch_repeats_that_stage_alone():
    def kill(pipeline):
        deaths = Failures(stage="", at_seconds=(1.5,), restart_seconds=2.0, detection_seconds=0.5)
        pipeline.fail_by(1, deaths, random.Random(1))

    records, pipeline = run([request(0)], specs(3), {"": FORK}, {}, before=kill)
    assert (records[0].outcome, records[0].end, records[0].attempts) == (Outcome.DONE, 5.0, 2)
    assert [pool.done_requests for pool in pipeline.pools] == [1, 1, 1]


@pytest.mark.parametrize(("errors", "ends"), [("request", 2.0), ("output", 3.0)])
def test_without_a_replica_a_branch_fails_with_the_request_or_alone(errors, ends):
    def kill(pipeline):
        pipeline.fail_by(1, Failures(stage="", at_seconds=(1.5,), detection_seconds=0.5), random.Random(1))

    options = {"runtime": {"branch_errors": errors, "recovery": {"restart": False}}}
    records, _ = run([request(0)], specs(4), {"": LONG_FORK}, options, before=kill)
    assert (records[0].outcome, records[0].end) == (Outcome.FAILED, ends)


SCENARIO = """
name = "thinker, talker and pictures"
seed = 1
duration_seconds = 50.0
[workload]
kind = "servegen-mm-image"
rate = 2.0
[orchestration]
[[stages]]
name = "thinker"
kind = "servers"
seconds = 0.1
output = true
[[stages]]
name = "talker"
kind = "servers"
seconds = 0.2
[[stages]]
name = "pictures"
kind = "servers"
reads = ["thinker"]
replicas = 2
seconds = 0.3
[[stages]]
name = "film"
kind = "servers"
reads = ["talker", "pictures"]
seconds = 0.1
"""


def test_a_scenario_names_what_each_stage_reads(tmp_path):
    file = tmp_path / "branches.toml"
    file.write_text(SCENARIO)
    result = simulate(load(file))
    assert {record.outcome for record in result.records} == {Outcome.DONE}
    quickest = min(record.end - record.arrival for record in result.records)
    assert quickest == pytest.approx(0.1 + 0.3 + 0.1)
    assert min(record.first - record.arrival for record in result.records) == pytest.approx(0.1)
