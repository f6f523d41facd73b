"""Replay events of vLLM-Omni's orchestrator through the simulator's driver: both decide the same."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import Rig, StageSpec
from vllm_omni_sched.config.stage_yaml import read_stage_options
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.core import PipelineCore
from vllm_omni_sched.core.pipeline.requests import UNPLACED
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.gated import GatedPool, Orchestration
from vllm_omni_sched.sim.pools.pipeline import Pipeline
from vllm_omni_sched.sim.pools.pool import StageSpec as SimulatedStage
from vllm_omni_sched.sim.pools.requests import UNKNOWN_TOKENS
from vllm_omni_sched.sim.work import Job, Request

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

Decision = tuple[float, str, int, str | None]
CLASSES = ("realtime", "interactive", "batch")


class Trace:
    """The requests of a run, the times of their outputs by request and start, the deaths, and the decisions."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.starts: Counter[str] = Counter()
        self.first: dict[tuple[str, int], float] = {}
        self.end: dict[str, float] = {}
        self.deaths: list[tuple[float, int]] = []
        self.decisions: list[Decision] = []

    def note(self, event: e.Event, now: float, actions: list[e.Action]) -> None:
        match event:
            case e.FirstOutput(_, name):
                self.first.setdefault((name, self.starts[name]), now)
            case e.Finished(_, name):
                self.end[name] = now
        for one in actions:
            if isinstance(one, e.Start):
                self.starts[one.work.request_id] += 1
                reason = None if one.reason is None else one.reason.value
                self.decisions.append((round(now, 9), one.work.request_id, one.work.replica_id, reason))
            elif isinstance(one, e.GivenUp):
                self.decisions += [(round(now, 9), name, UNPLACED, one.reason.value) for name in one.receivers]


class Scripted:
    """Plays back the outputs of a recorded replica at their recorded times."""

    def __init__(
        self, sim: Simulator, trace: Trace, done: Callable[[Job], None], on_first_output: Callable[[Job], None]
    ) -> None:
        self._sim, self._trace, self._done, self._on_first_output = sim, trace, done, on_first_output
        self._jobs: dict[Job, float] = {}  # with the times of their first outputs

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        name = job.request.name
        self._trace.starts[name] += 1
        end = self._trace.end.get(name, math.inf)  # one that fails because of deaths does not end
        first = self._jobs[job] = self._trace.first.get((name, self._trace.starts[name]), end)
        if first < end:  # else an engine tells both at once
            self._sim.at(first, self._begin, job)
        if end < math.inf:
            self._sim.at(end, self._finish, job)

    def _begin(self, job: Job) -> None:
        if job in self._jobs:
            self._on_first_output(job)

    def _finish(self, job: Job) -> None:
        if job in self._jobs:
            job.first = self._jobs.pop(job)
            self._done(job)

    def abort(self, job: Job) -> None:
        raise AssertionError("nobody leaves")

    def kill(self) -> list[Job]:
        lost = list(self._jobs)
        self._jobs.clear()
        return lost

    def busy_seconds(self) -> dict[str, float]:
        return {}


def watch(monkeypatch: pytest.MonkeyPatch, trace: Trace) -> None:
    plain = PipelineCore.handle

    def handle(core: PipelineCore, event: e.Event, now: float) -> list[e.Action]:
        actions = plain(core, event, now)
        trace.note(event, now, actions)
        return actions

    monkeypatch.setattr(PipelineCore, "handle", handle)


async def recorded(
    rng: random.Random, replicas: int, at_once: int, count: int, options: dict[str, Any], deaths: float = 0.0
) -> Trace:
    """Requests come, speak and end in random order, each at its own time; replicas die with that probability."""
    trace = Trace()
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch(monkeypatch, trace)
        async with Rig(StageSpec(final_output=True, replicas=replicas, max_num_seqs=at_once), **options) as rig:
            begun: set[str] = set()
            while len(trace.requests) < count or rig.at(0):
                rig.now += rng.expovariate(2.0 * replicas)
                running = sorted(rig.at(0))
                if running and rng.random() < deaths:
                    dies = rig.replica_id(0, rng.choice(running))
                    begun -= {name for name in running if rig.replica_id(0, name) == dies}
                    trace.deaths.append((rig.now, dies))
                    await rig.kill(0, dies)
                    continue
                if len(trace.requests) < count and (not running or rng.random() < 0.5):
                    await ask(rig, trace, rng)
                    continue
                name = rng.choice(running)
                if name in begun:
                    await rig.finish(0, name)
                else:
                    begun.add(name)
                    await rig.step(0, name)
            assert not rig.left_over()
    return trace


async def ask(rig: Rig, trace: Trace, rng: random.Random) -> None:
    number, tokens, sla, user = len(trace.requests), rng.randint(1, 40), rng.choice(CLASSES), rng.randint(1, 9)
    priority = rng.choice([0, 0, 3])
    trace.requests.append(Request(number, rig.now, tokens, 1, (), sla, user, priority))
    prompt = (number, *range(tokens - 1))
    extra = {"max_tokens": UNKNOWN_TOKENS, "extra_args": {"omni_class": sla, "omni_user": user}}
    await rig.ask(f"{number}", prompt, params=extra, priority=priority)


def replayed(trace: Trace, replicas: int, at_once: int, options: dict[str, Any]) -> Trace:
    sim, found, script = Simulator(), Trace(), Trace()
    script.first, script.end = trace.first, trace.end
    specs = [SimulatedStage("stage0", StageKind.AR, replicas, at_once)]
    shared = Orchestration(sim, read_stage_options(options, "the test"), specs, [(0,)], random.Random(0))
    pools: list[GatedPool] = []

    def made(_: int, done: Callable[[Job], None]) -> Scripted:
        return Scripted(sim, script, done, lambda job: pools[0].on_first_output(job))

    with pytest.MonkeyPatch.context() as monkeypatch:
        watch(monkeypatch, found)
        pools.append(GatedPool(sim, 0, specs[0], made, shared))
        records: list[Any] = []
        pipeline = Pipeline(sim, pools, trace.requests, records.append, {"": (0,)}, shared)

        def dies(replica_id: int) -> None:
            assert pools[0].kill(replica_id)
            pipeline.notice(pools[0], replica_id, 0.0)

        for at, replica_id in trace.deaths:
            sim.at(at, dies, replica_id)
        sim.run()
        assert len(records) == len(trace.requests)
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batching": {"target_latency_ms": 500.0, "adjust_interval_ms": 100.0}},
    {"balancing": {"policy": "round-robin"}, "graph": {"priority": {"enabled": False}}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["usual", "slow batches", "in turn"])
@pytest.mark.parametrize(("replicas", "at_once"), [(3, 2), (40, 8)], ids=["few replicas", "drawn replicas"])
async def test_both_drivers_decide_the_same(replicas: int, at_once: int, options: dict[str, Any]) -> None:
    """Of many replicas some are drawn, also when a driver asks again: there, each has room, so that none asks."""
    graph = {**options.get("graph", {}), "merging": {"enabled": False}}
    options = {**options, "graph": graph}
    trace = await recorded(random.Random(replicas), replicas, at_once, 60 if replicas < 40 else 90, options)
    assert len(trace.decisions) == len(trace.requests)
    assert len({replica for _, _, replica, _ in trace.decisions}) > 1
    assert replayed(trace, replicas, at_once, options).decisions == trace.decisions


async def test_both_drivers_let_the_same_follow_from_a_death() -> None:
    options = {
        "graph": {"merging": {"enabled": False}},
        "runtime": {"recovery": {"max_restarts": 99, "max_redispatches": 99}},
    }
    trace = await recorded(random.Random(5), 3, 2, 60, options, deaths=0.1)
    assert len(trace.deaths) > 5
    moved = [decision for decision in trace.decisions if decision[3] is None]
    assert len(moved) > 5  # placed by recovery
    assert "poison" in {decision[3] for decision in trace.decisions}
    assert replayed(trace, 3, 2, options).decisions == trace.decisions
