"""One contract for everything that limits the size of a step, on a plant latency = a + b * size with noise.

A new controller gets its tests by one line in ``CONTROLS``.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.batch_size import BatchControl, LimitReason
from vllm_omni_sched.resource.engine.prefill_budget import AdaptivePrefill
from vllm_omni_sched.resource.pid import PidBatch

TARGET = 0.05


@dataclass(frozen=True)
class Case:
    """A controller, the size that its plants should settle at, and how far its step latency may swing after that."""

    make: Callable[[], BatchControl]
    sizes: tuple[float, float]
    swing: float  # of the mean latency per second, as a part of the target
    settle_seconds: float = 40.0
    step_seconds: float = 0.05


CONTROLS = {
    "pid": Case(PidBatch, (10, 30), swing=0.15),
    "adaptive": Case(AdaptivePrefill, (200, 7000), swing=0.15, settle_seconds=20.0),
}
STEERED = pytest.mark.parametrize("case", CONTROLS.values(), ids=CONTROLS)
EVERY = pytest.mark.parametrize("make", [c.make for c in CONTROLS.values()], ids=CONTROLS)


class Plant:
    """Steps of the controller's limit, one after another."""

    def __init__(self, control: BatchControl, case: Case, seed: int, noise: float) -> None:
        self.control, self.case = control, case
        self.random, self.noise = random.Random(seed), noise
        self.now = 0.0

    def run(self, size_at_target: float, base_part: float, seconds: float) -> list[float]:
        """The latency without noise, averaged per second, while the target is met at ``size_at_target``."""
        base = base_part * TARGET
        slope = (TARGET - base) / size_at_target
        means, in_second = [], []
        end = self.now + seconds
        while self.now < end:
            latency = base + slope * self.control.limit
            self.now += self.case.step_seconds
            self.control.observe(max(0.0, latency * (1 + self.random.gauss(0, self.noise))), self.now)
            assert self.control.minimum <= self.control.limit <= self.control.maximum
            in_second.append(latency)
            if len(in_second) * self.case.step_seconds >= 1:
                means.append(sum(in_second) / len(in_second))
                in_second = []
        return means


def check_settled(case: Case, means: list[float]) -> None:
    late = means[int(case.settle_seconds) :]
    assert abs(sum(late) / len(late) / TARGET - 1) <= 0.1
    assert max(late) - min(late) <= case.swing * TARGET


plants = (st.floats(0, 1), st.floats(0, 0.7), st.integers(0, 2**32))


@STEERED
@settings(deadline=None)
@given(*plants)
def test_it_settles_within_ten_per_cent_and_does_not_swing(case, where, base_part, seed):
    low, high = case.sizes
    plant = Plant(case.make(), case, seed, noise=0.03)
    check_settled(case, plant.run(low + where * (high - low), base_part, case.settle_seconds + 20))


@STEERED
@settings(deadline=None)
@given(*plants)
def test_it_recovers_after_a_load_step(case, where, base_part, seed):
    low, high = case.sizes
    size = low + where * (high - low)
    plant = Plant(case.make(), case, seed, noise=0.03)
    plant.run(size, base_part, case.settle_seconds)
    check_settled(case, plant.run(max(low, size / 2), base_part, case.settle_seconds + 20))
    check_settled(case, plant.run(size, base_part, case.settle_seconds + 20))


@STEERED
@pytest.mark.parametrize(("size", "reason"), [(0.01, LimitReason.AT_MIN), (1e6, LimitReason.AT_MAX)])
def test_where_the_target_is_out_of_reach_it_stays_at_the_bound_and_comes_back_at_once(case, size, reason):
    """There is no windup: a hundred seconds at a bound do not delay what follows."""
    control = case.make()
    plant = Plant(control, case, seed=1, noise=0.0)
    plant.run(size, 0.0, 140)
    assert control.limit == (control.minimum if reason is LimitReason.AT_MIN else control.maximum)
    assert control.reason is reason
    check_settled(case, plant.run(case.sizes[1], 0.2, case.settle_seconds + 20))


@EVERY
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 10), st.one_of(st.none(), st.integers(0, 10**6)))), st.randoms()
)
def test_bounds_hold_whatever_is_observed(make, observations, rng):
    control, now = make(), 0.0
    for latency, passed, size in observations:
        now += passed if rng.random() < 0.9 else -passed
        control.observe(latency, now, size)
        assert control.minimum <= control.limit <= control.maximum
        assert isinstance(control.limit, int)
        assert isinstance(control.reason, LimitReason)


@STEERED
def test_steps_that_were_not_full_do_not_raise_the_limit_but_may_lower_it(case):
    control = case.make()
    Plant(control, case, seed=1, noise=0.0).run(case.sizes[1], 0.0, 60)
    control.observe(0.001, 100.0, size=0)  # ends the interval in which there were full steps
    settled = control.limit
    for i in range(200):
        control.observe(0.001, 100 + i / 10, size=0)
        assert control.limit <= settled
        assert control.reason is not LimitReason.UNDER_TARGET or i < 10
    for i in range(40):
        control.observe(0.2, 130 + i / 10, size=1)
    assert control.limit < settled


def test_one_decision_per_interval():
    control = PidBatch()
    limits = []
    for i in range(1, 41):
        control.observe(0.001, i / 10)
        limits.append(control.limit)
    assert set(limits[:10]) == {1}
    assert [b - a for a, b in pairwise(limits)].count(0) == 36
    control.observe(0.001, 1000.0)  # a long gap is one interval
    assert control.limit <= 2 * limits[-1]
