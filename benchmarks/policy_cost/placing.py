"""Decisions of a stage about where a request goes, by the objects that serve: policies, gate, balancer, loads."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from benchmarks.policy_cost.bench import Bench, Clock, Decision
from vllm_omni_sched.graph.order import INTERACTIVE
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind
from vllm_omni_sched.omni.stages.limits import ReplicaLoad
from vllm_omni_sched.omni.stages.policies import Policies
from vllm_omni_sched.omni.stages.requests import Known
from vllm_omni_sched.omni.stages.work import Work
from vllm_omni_sched.resource.batch_size import FixedBatch
from vllm_omni_sched.resource.stage_cost import Features
from vllm_omni_sched.stage_options import StageSchedConfig

RUNNING = 8  # requests on each replica
AT_ONCE = 32
USERS = 100


class Pool:
    """Answer what policies ask of vLLM-Omni's pool: all of its replicas are there, and nothing is bound."""

    stage_id, at_once = 0, AT_ONCE

    def __init__(self, replicas: int) -> None:
        self.num_replicas = replicas
        self.suspected: set[int] = set()
        self.draining: set[int] = set()

    def live_replica_ids(self) -> list[int]:
        return list(range(self.num_replicas))

    def is_replica_available(self, replica_id: int) -> bool:
        return 0 <= replica_id < self.num_replicas

    def get_bound_replica_id(self, request_id: str) -> int | None:
        return None


def release(options: Mapping[str, Any]) -> Callable[[int, random.Random], Bench]:
    """Release a request of one of `USERS` users; each replica runs `RUNNING` others, and has room."""

    def laid_out(replicas: int, dice: random.Random) -> Bench:
        clock, numbers, pool = Clock(), count(), Pool(replicas)
        graph = StageGraph.of([Stage(0, "llm", StageKind.AR, final_output=True, replicas=replicas)])
        policies = Policies(StageSchedConfig(**options), graph, False, dice)
        stage, book = policies.of(pool), policies.affinity.get(0)

        def work(now: float) -> Work:
            known = Known(f"r{next(numbers)}", now, INTERACTIVE, False, 0, "text", _keys(dice), 0)
            known.features[0], known.costs[0] = Features(), dice.uniform(1e3, 1e4)  # none ends while it is measured
            return Work(known.request_id, 0, None, None, {}, known, now, known.costs[0])

        for replica_id in range(replicas):
            for _ in range(RUNNING):
                stage.load(replica_id).begin(f"b{next(numbers)}", dice.uniform(1e3, 1e4), clock())
            if book is not None:
                book.note(replica_id, _keys(dice))

        def comes() -> float:
            stage.waits(pool, work(now := clock()), now)
            return now

        return Bench(lambda now: stage.release(pool, now), comes)

    return laid_out


def _keys(dice: random.Random) -> frozenset[str]:
    return frozenset([f"user {dice.randrange(USERS)}"])


def look(running: int, dice: random.Random) -> Bench:
    """At a replica that runs so many requests; one ends and another begins between two looks."""
    load, clock, numbers = ReplicaLoad(FixedBatch(running)), Clock(), count(running)
    for number in range(running):
        load.begin(str(number), dice.uniform(1.0, 10.0), clock())

    def changes() -> float:
        number, now = next(numbers), clock()
        load.end(str(number - running), now)
        load.begin(str(number), dice.uniform(1.0, 10.0), now)
        return now

    return Bench(lambda now: (load.remaining_seconds(now), load.next_end_seconds(now)), changes)


REPLICAS = (8, 100, 1000, 10_000)
DECISIONS = (
    Decision("StagePolicies.release, by cost", "replicas", release({}), REPLICAS),
    Decision(
        "StagePolicies.release, least queue", "replicas", release({"balancing": {"policy": "least-queue"}}), REPLICAS
    ),
    Decision("ReplicaLoad, a look", "running", look, (32, 256, 1024)),
)
