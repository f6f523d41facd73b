"""The meter of inter-token latency."""

import pytest

from vllm_omni_sched.monitor.step_times import ItlMeter


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
