"""Random graphs of stages, deaths, lost inputs and errors: each request leaves once, and nothing runs for nothing."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.graphs import Branching, random_sources
from vllm_omni_sched.graph.flow import FlowPlan, RequestFlow, StagePhase

pytestmark = pytest.mark.usefixtures("validated_core")

COUNT = 8
STEPS = 80


def chunked_of(rng, sources):
    return {stage for stage, reads in sources.items() if reads and rng.random() < 0.4}


def outputs_of(rng, one):
    return sorted(rng.sample(one.finals, rng.randint(1, len(one.finals))))


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_flow(seed, consumes, chunks):
    """However often inputs are lost, each stage starts with all its inputs, and all outputs come."""
    rng = Random(seed)
    sources = random_sources(rng)
    chunked = chunked_of(rng, sources) if chunks else ()
    one = Branching(sources, {stage for stage in sources if rng.random() < 0.4}, chunked=chunked)
    flow = RequestFlow(FlowPlan.of(one.graph, outputs_of(rng, one)), consumes)
    started = Counter(flow.begin())
    losses = 6
    for _ in range(500):
        flow.validate()
        running = [stage for stage in flow.plan.stages if flow.phase(stage) is StagePhase.STARTED]
        if flow.is_over:
            break
        assert running, "nothing runs, and outputs are missing"
        stage = rng.choice(running)
        if losses and rng.random() < 0.4:
            losses -= 1
            if stage in flow.plan.chunk_groups:
                assert stage in flow.restart(stage)
                continue
            reads = flow.plan.sources[stage]
            again = flow.again(stage, rng.sample(reads, rng.randint(0, len(reads))))
            assert set(again.starts) <= set(again.stages)
            started.update(again.starts)
            continue
        if rng.random() < 0.5:
            flow.send(stage)
        found = list(flow.finished(stage))
        while flow.lacks(stage) and flow.phase(stage) is StagePhase.DONE:
            found += flow.again(flow.lacks(stage)[0]).starts
        started.update(found)
    assert flow.complete == set(flow.plan.outputs)
    assert set(started) == set(flow.plan.stages)
    if losses == 6:
        assert set(started.values()) == {1}


def fed(flow, stage):
    """Return whether all that a stage reads has ended, so that the end of its request leaves nothing out."""
    return all(flow.phase(source) is StagePhase.DONE for source in flow.plan.sources[stage])


OPTIONS = st.fixed_dictionaries(
    {
        "runtime": st.fixed_dictionaries(
            {
                "branch_errors": st.sampled_from(["request", "output"]),
                "credits": st.sampled_from([{}, {"enabled": True, "capacity": 2}]),
                "recovery": st.sampled_from([{}, {"max_redispatches": 0}]),
            }
        ),
        "graph": st.sampled_from([{}, {"priority": {"enabled": False}}]),
        "balancing": st.sampled_from([{}, {"policy": "round-robin"}]),
    }
)


FEW_MOVES = {
    "runtime": {
        "branch_errors": "output",
        "credits": {"enabled": True, "capacity": 2},
        "recovery": {"max_redispatches": 0},
    }
}


def undisturbed(one):
    assert one.ended.keys() == one.outputs.keys()
    stages = one.core.stages.values()
    assert not any(stage.waiting or stage.running or len(stage.merger) for stage in stages)
    recovery, credits = one.core.recovery, one.core.context.credits
    assert recovery is not None
    assert len(recovery.policy) == 0
    assert not recovery.works
    assert not recovery.lost
    assert not recovery._lacking
    if credits is not None:
        assert len({credits.free(stage) for stage in credits.order}) == 1


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), OPTIONS, st.booleans(), st.booleans(), st.booleans())
# a stage that was to run again for one successor runs for another one first
@example(
    5866,
    {
        "runtime": {"branch_errors": "request", "credits": {"enabled": True}, "recovery": {}},
        "graph": {},
        "balancing": {},
    },
    False,
    True,
    False,
)
# a stage whose work could not be moved again is lost for a second successor, too
@example(780, {**FEW_MOVES, "graph": {}, "balancing": {"policy": "round-robin"}}, False, True, False)
def test_each_request_leaves_once(seed, options, shares, consumes, chunks):
    """Requests keep their inputs, as in the simulator, or lose some, as with connectors."""
    rng = Random(seed)
    sources = random_sources(rng)
    finals = {stage for stage in sources if rng.random() < 0.3}
    chunked = chunked_of(rng, sources) if chunks else set()
    at_once = rng.randint(1, 3), rng.randint(1, 3)
    one = Branching(sources, finals, *at_once, consumes=consumes, chunked=chunked, payloads=consumes, **options)
    flows = {}
    for number in range(COUNT):
        name = str(number)
        key = rng.choice(["x", "y", None]) if shares else None
        flows[name] = one.come(name, outputs_of(rng, one), key)
    for _ in range(STEPS):
        running, dice = one.running(), rng.random()
        if dice < 0.55 and running:
            one.finish(*rng.choice(running))
        elif dice < 0.7:
            stage = rng.choice(list(sources))
            most = (lambda reads: ()) if not consumes else (lambda reads: rng.sample(reads, rng.randint(0, len(reads))))
            one.kill(stage, rng.choice(list(one.core.stages[stage].replicas)), most)
        elif dice < 0.78 and consumes and running:
            name, stage = rng.choice(running)
            if sources[stage] and stage not in chunked:
                one.recall(name, stage, rng.choice(sources[stage]))
        elif dice < 0.82 and running:
            one.error(*rng.choice(running))
        elif dice < 0.86:
            left = [name for name in one.outputs if name not in one.ended]
            if left:
                one.leave(rng.choice(left), "aborted")
        else:
            one.revive()
            one.now += rng.random()
    one.finish_all()
    undisturbed(one)
    for name, flow in flows.items():
        came = {stage for stage in one.outputs[name] if stage in flow.plan.outputs}
        assert set(one.outputs[name]) <= set(flow.plan.stages)
        if one.ended[name] in ("done", "partly"):
            assert came == set(flow.plan.outputs) - flow.dropped


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_without_faults_each_stage_starts_once(seed):
    rng = Random(seed)
    sources = random_sources(rng)
    chunked = chunked_of(rng, sources)
    one = Branching(sources, {stage for stage in sources if rng.random() < 0.3}, rng.randint(1, 3), chunked=chunked)
    flows = {str(number): one.come(str(number), outputs_of(rng, one)) for number in range(COUNT)}
    while one.running():
        one.finish(*rng.choice([(name, stage) for name, stage in one.running() if fed(flows[name], stage)]))
    undisturbed(one)
    assert set(one.ended.values()) == {"done"}
    assert one.starts == Counter((name, stage) for name, flow in flows.items() for stage in flow.plan.stages)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_with_recovery_all_is_answered(seed):
    """Each replica dies once, and inputs are lost with it."""
    rng = Random(seed)
    sources = random_sources(rng)
    finals = {stage for stage in sources if rng.random() < 0.3}
    chunked = chunked_of(rng, sources)
    one = Branching(sources, finals, 2, chunked=chunked, runtime={"recovery": {"max_redispatches": 40}})
    flows = {str(number): one.come(str(number), outputs_of(rng, one)) for number in range(COUNT)}
    replicas = [(stage, index) for stage in sources for index in range(2)]
    rng.shuffle(replicas)
    while running := one.running():
        if replicas and rng.random() < 0.3:
            one.kill(*replicas.pop(), lambda reads: rng.sample(reads, rng.randint(0, len(reads))))
            one.revive()
        else:
            one.finish(*rng.choice(running))
    one.finish_all()
    undisturbed(one)
    assert set(one.ended.values()) == {"done"}
    for name, flow in flows.items():
        assert set(flow.plan.outputs) <= set(one.outputs[name])
