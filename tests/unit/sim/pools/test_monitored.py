"""A monitored simulation detects what is slow, as in serving."""

from __future__ import annotations

import random

import pytest

from tests.support.pools import request
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.monitor.anomaly.finding import AnomalyKind
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.gated import GatedPool, Orchestration
from vllm_omni_sched.sim.pools.pipeline import Pipeline
from vllm_omni_sched.sim.pools.pool import StageSpec
from vllm_omni_sched.sim.servers import QueueServer

pytestmark = pytest.mark.usefixtures("validated_core")

SLOW_FROM, SLOW_SECONDS = 100.0, 40.0


def run(requests, monitored, slow=False, **options):
    """Two replicas that do a request in a second; one of them becomes slow."""
    sim, records = Simulator(), []
    spec = StageSpec("llm", replicas=2)
    shared = Orchestration(sim, StageSchedConfig(**options), [spec], [(0,)], random.Random(1), monitored)

    def make(index, done):
        def seconds(*_):
            return SLOW_SECONDS if slow and index == 1 and sim.now >= SLOW_FROM else 1.0

        return QueueServer(sim, done, 1, seconds, random.Random(0))

    pools = [GatedPool(sim, 0, spec, make, shared)]
    Pipeline(sim, pools, requests, records.append, {"": (0,)}, shared)
    sim.run()
    assert len(records) == len(requests)
    return shared, sim


def steady():
    return [request(n, at=0.7 * n) for n in range(240)]  # more than one replica could do


ALONE = {"graph": {"merging": {"enabled": False}}}


def test_a_replica_that_becomes_slow_is_found():
    shared, _ = run(steady(), monitored=True, slow=True, **ALONE)
    kinds = {one.kind for _, one in shared.anomalies}
    assert AnomalyKind.STAGE_TIMEOUT in kinds
    first, anomaly = shared.anomalies[0]
    assert SLOW_FROM < first < SLOW_FROM + SLOW_SECONDS
    assert anomaly.subject == "llm (0)"


def test_steady_replicas_are_not():
    shared, _ = run(steady(), monitored=True, **ALONE)
    assert shared.anomalies == []


def test_nothing_is_looked_for_unless_asked():
    shared, _ = run(steady(), monitored=False, slow=True, **ALONE)
    assert shared.anomalies == []


def test_the_clock_of_the_checks_ends_with_the_requests():
    _, sim = run(steady(), monitored=True, **ALONE)
    assert sim.now < 240 * 0.7 + 5.0
