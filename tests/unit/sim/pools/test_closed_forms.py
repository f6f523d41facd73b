"""The simulator against queues whose answers are known: all within 2 %, for fixed seeds."""

from __future__ import annotations

import math
import random

import pytest

from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.pipeline import Pipeline
from vllm_omni_sched.sim.pools.pool import Pool, RoundRobinChooser, StageSpec
from vllm_omni_sched.sim.servers import QueueServer, SharedServer
from vllm_omni_sched.sim.work import Request

WITHIN = 0.02


def poisson(rate, count, rng):
    now = 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        yield Request(number, now, 0, 1)


def sojourns(make, rate, count, seed):
    """Mean time in the system, and how many came."""
    sim, total = Simulator(), []
    pool = Pool(sim, 0, StageSpec("only"), lambda _, done: make(sim, done), RoundRobinChooser())
    pipeline = Pipeline(
        sim,
        [pool],
        poisson(rate, count, random.Random(seed)),
        lambda record: total.append(record.end - record.arrival),
        {"": (0,)},
    )
    sim.run()
    assert pipeline.done == len(total) == count
    return math.fsum(total) / count


def erlang_c(places, offered):
    """Return the probability to wait in M/M/c with so much offered load in Erlang."""
    terms = [offered**k / math.factorial(k) for k in range(places)]
    last = offered**places / math.factorial(places) * places / (places - offered)
    return last / (sum(terms) + last)


@pytest.mark.parametrize(("places", "offered", "seed"), [(1, 0.5, 1), (4, 2.4, 2), (16, 12.0, 2)])
def test_exponential_service_at_several_places(places, offered, seed):
    waited = []

    def service(job, rng):
        waited.append(sim_of[0].now > job.submitted)
        return rng.expovariate(1.0)

    sim_of = []

    def make(sim, done):
        sim_of.append(sim)
        return QueueServer(sim, done, places, service, random.Random(seed + 100))

    mean = sojourns(make, offered, 60_000, seed)
    wait = erlang_c(places, offered)
    assert mean == pytest.approx(1 + wait / (places - offered), rel=WITHIN)
    assert sum(waited) / len(waited) == pytest.approx(wait, rel=WITHIN)


def test_constant_service_at_one_place():
    """The wait is rho / (2 (1 - rho)) services, by Pollaczek and Khinchine."""
    mean = sojourns(lambda sim, done: QueueServer(sim, done, 1, lambda *_: 1.0, random.Random(0)), 0.6, 60_000, 4)
    assert mean - 1 == pytest.approx(0.6 / (2 * 0.4), rel=WITHIN)


@pytest.mark.parametrize(
    ("draw", "mean", "seed"),
    [
        (lambda job, rng: rng.expovariate(1.0), 1.0, 5),
        (lambda job, rng: 1.0, 1.0, 6),
        (lambda job, rng: rng.choice([0.2, 0.2, 0.2, 3.4]), 1.0, 7),
    ],
    ids=["exponential", "constant", "mixed"],
)
def test_shared_service_does_not_mind_how_it_is_distributed(draw, mean, seed):
    """The mean of M/G/1-PS is that of M/M/1, whatever the service is."""
    found = sojourns(lambda sim, done: SharedServer(sim, done, draw, random.Random(seed + 100)), 0.5, 50_000, seed)
    assert found == pytest.approx(mean / (1 - 0.5), rel=WITHIN)
