"""What clients saw of one engine, with costs that one can add up by hand."""

import pytest

from tests.support.sim_engine import PlainCosts
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.episode import run_episode
from vllm_omni_sched.sim.work import Request

LIMITS = EngineLimits(10**6)


def run(requests, targets=(1.0, 1.0), seconds=10.0, drain=10.0, **controls):
    costs = PlainCosts(base=0.1)
    return run_episode(requests, costs, LIMITS, OmniSchedConfig(), seconds, targets, drain_seconds=drain, **controls)


def test_what_clients_saw():
    seen = run([Request(0, 0.0, 10, 5), Request(1, 5.0, 10, 3)])
    assert (seen.requests, seen.attainment) == (2, 1.0)
    assert seen.goodput == pytest.approx(0.2)
    assert seen.throughput == pytest.approx(0.8)
    assert seen.ttft_p50 == pytest.approx(0.1)
    assert seen.itl_p99 == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(("targets", "within"), [((0.11, 0.11), 1.0), ((0.05, 1.0), 0.0), ((1.0, 0.05), 0.0)])
def test_both_targets_have_to_be_met(targets, within):
    assert run([Request(0, 0.0, 10, 5)], targets).attainment == within


def test_who_has_not_ended_is_not_within():
    seen = run([Request(0, 0.0, 10, 2), Request(1, 1.0, 10, 1000)], drain=1.0)
    assert (seen.requests, seen.attainment) == (2, 0.5)
    assert seen.ttft_p99 == 11.0  # as long as the episode


def test_who_arrives_later_is_left_out():
    assert run([Request(0, 0.0, 10, 2), Request(1, 10.0, 10, 2)]).requests == 1


def test_nobody_came():
    seen = run([])
    assert (seen.requests, seen.attainment, seen.ttft_p50) == (0, 0.0, 0.0)


def test_controls_take_the_place_of_options():
    requests = [Request(0, 0.0, 10, 100), Request(1, 0.5, 1000, 2)]
    assert run(requests, prefill=PidBatch(minimum=100, maximum=100)).ttft_p99 == pytest.approx(1.1, abs=0.15)
    alone = run(requests, batch=PidBatch(minimum=1, maximum=1))
    assert alone.ttft_p99 > 9
