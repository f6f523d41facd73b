"""Decisions of a stage about where and when a request runs, by the core that serves: events in, actions out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from benchmarks.policy_cost.bench import WAITING, Bench, Clock, Decision
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.core import PipelineCore
from vllm_omni_sched.core.pipeline.load import ReplicaLoad
from vllm_omni_sched.core.pipeline.requests import PipelineRequest, StageWork
from vllm_omni_sched.graph.order import DEFAULT_CLASSES
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind
from vllm_omni_sched.resource.pipeline.stage_cost import Features

RUNNING = 8  # requests on each replica
AT_ONCE = 32
USERS = 100
FEATURES = Features(output_tokens=200_000)  # none ends while it is measured


class Stages:
    """Hold one stage of so many replicas, each with `RUNNING` requests of `USERS` users."""

    def __init__(self, replicas: int, at_once: int, options: Mapping[str, Any], rng: random.Random) -> None:
        self.clock, self._numbers, self._rng = Clock(), count(), rng
        graph = StageGraph.of([Stage(0, "llm", StageKind.AR, final_output=True, replicas=replicas)])
        self.core = PipelineCore(PipelineContext(StageSchedConfig(**options), graph, rng))
        self.core.add_stage(0, at_once, range(replicas))
        for replica_id in range(replicas):
            for _ in range(RUNNING):
                self.core.handle(e.Placed(self.submitted(), replica_id), self.clock())

    def submitted(self) -> StageWork:
        """Return the work of a new request, which has come to the stage."""
        now, rng = self.clock(), self._rng
        keys = frozenset([f"user {rng.randrange(USERS)}"])
        known = PipelineRequest(f"r{next(self._numbers)}", now, rng.choice(DEFAULT_CLASSES), keys=keys, path=(0,))
        self.core.handle(e.Arrived(known), now)
        work = StageWork(request_id=known.request_id, stage_id=0, known=known, arrived=now)
        self.core.handle(e.Submitted(work, FEATURES), now)
        return work

    def finish(self, work: StageWork) -> None:
        """Let a request end and leave, without a result, so that nothing is learnt."""
        now = self.clock()
        self.core.handle(e.Finished(0, work.request_id, ok=False), now)
        self.core.handle(e.Left(work.request_id), now)


def start(options: Mapping[str, Any]) -> Callable[[int, random.Random], Bench]:
    """Start a request that comes; each replica has room."""

    def laid_out(replicas: int, rng: random.Random) -> Bench:
        stages = Stages(replicas, AT_ONCE, options, rng)
        return Bench(
            lambda work: stages.core.handle(e.Waits(work), stages.clock.now),
            stages.submitted,
            lambda work, _: stages.finish(work),
        )

    return laid_out


def next_one(waiting: int, rng: random.Random) -> Bench:
    """Start the next of so many that wait, on the one place that has become free."""
    stages = Stages(8, RUNNING, {}, rng)
    for _ in range(waiting):
        stages.core.handle(e.Waits(stages.submitted()), stages.clock.now)

    def comes() -> None:
        stages.core.handle(e.Waits(stages.submitted()), stages.clock.now)
        stages.finish(next(iter(stages.core.stages[0].running.values())))

    return Bench(lambda _: stages.core.handle(e.Tick(), stages.clock.now), comes)


def comes(waiting: int, rng: random.Random) -> Bench:
    """Queue a request behind so many others; there is no room."""
    stages = Stages(8, RUNNING, {}, rng)
    for _ in range(waiting):
        stages.core.handle(e.Waits(stages.submitted()), stages.clock.now)

    def leaves(work: StageWork, _: object) -> None:
        stages.core.handle(e.Detached(0, work.request_id), stages.clock.now)
        stages.core.handle(e.Dropped(0, work.request_id), stages.clock.now)
        stages.core.handle(e.Left(work.request_id), stages.clock.now)

    return Bench(lambda work: stages.core.handle(e.Waits(work), stages.clock.now), stages.submitted, leaves)


def look(running: int, rng: random.Random) -> Bench:
    """Time the look at a replica that runs so many requests; one ends and another begins between two looks."""
    load, clock, numbers = ReplicaLoad(running), Clock(), count(running)
    for number in range(running):
        load.begin(str(number), rng.uniform(1.0, 10.0), clock())

    def changes() -> float:
        number, now = next(numbers), clock()
        load.end(str(number - running), now)
        load.begin(str(number), rng.uniform(1.0, 10.0), now)
        return now

    return Bench(lambda now: (load.remaining_seconds(now), load.next_end_seconds(now)), changes)


REPLICAS = (8, 100, 1000, 10_000)
DECISIONS = (
    Decision("PipelineCore, a request comes and starts, by cost", "replicas", start({}), REPLICAS, barred=False),
    Decision(
        "PipelineCore, a request comes and starts, least queue",
        "replicas",
        start({"balancing": {"policy": "least-queue"}}),
        REPLICAS,
        barred=False,
    ),
    Decision("PipelineCore, a request comes and waits", "waiting", comes, WAITING, barred=False),
    Decision("PipelineCore, the next request starts", "waiting", next_one, WAITING, barred=False),
    Decision("ReplicaLoad, a look", "running", look, (32, 256, 1024)),
)
