"""The meter of inter-token latency."""

import random

import pytest

from vllm_omni_sched.monitor.step_times import ItlMeter, StepMeter


def test_the_first_interval_is_the_mean_and_later_ones_move_it():
    meter = ItlMeter(rise=0.5, fall=0.1)
    meter.step(1.0, 4)
    assert meter.seconds is None
    meter.step(1.01, 4)
    assert meter.seconds == pytest.approx(0.01)
    meter.step(1.11, 4)
    assert meter.seconds == pytest.approx(0.055)
    meter.step(1.12, 4)
    assert meter.seconds == pytest.approx(0.055 - 0.1 * 0.045)


def test_idle_time_is_no_latency():
    meter = ItlMeter()
    meter.step(1.0, 1)
    meter.step(1.01, 0)
    meter.step(9.0, 1)
    assert meter.seconds is None
    meter.step(9.02, 1)
    assert meter.seconds == pytest.approx(0.02)


@pytest.mark.parametrize("weights", [{"rise": 0.0}, {"fall": 1.5}, {"rise": float("nan")}])
def test_weights_are_above_0_and_at_most_1(weights):
    with pytest.raises(ValueError, match=next(iter(weights))):
        ItlMeter(**weights)


def test_decode_steps_in_one_call_are_those_that_come_one_by_one():
    rng, now = random.Random(1), 1.0
    one_by_one, together = StepMeter(), StepMeter()
    for _ in range(50):
        began, steps = now, [rng.uniform(0.0, 0.02) for _ in range(rng.randrange(1, 6))]
        decoding = rng.randrange(3)
        each = [one_by_one.step(now := now + seconds, decoding, 0) for seconds in steps]
        found = together.decode_steps(began, steps, decoding)
        assert list(found) == pytest.approx([one for one in each if one is not None])
        now += rng.uniform(0.0, 0.02)
        tokens = rng.randrange(2) * 512
        assert one_by_one.step(now, 1, tokens) == pytest.approx(together.step(now, 1, tokens))
        assert together.itl.seconds == pytest.approx(one_by_one.itl.seconds)
        predicted = [one.predict(size) for one in (together, one_by_one) for size in (0, 100)]
        assert predicted[:2] == pytest.approx(predicted[2:])
