"""What was promised, what it costs, what steps take: the meters."""

import pytest

from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, REALTIME
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.slo import SloMeter
from vllm_omni_sched.monitor.step_times import CostModel, StepMeter


def verdict(sla, *tokens: float, counts: bool = True) -> tuple[int, int]:
    metrics = SchedulerMetrics()
    meter = SloMeter(metrics)
    meter.begin("r", sla, 0.0)
    for now in tokens:
        meter.token("r", now)
    meter.end("r", counts=counts)
    assert len(meter) == 0
    return metrics.slo_met[sla.name], metrics.slo_missed[sla.name]


@pytest.mark.parametrize(
    ("sla", "tokens", "expected"),
    [
        (INTERACTIVE, (1.9, 1.95), (1, 0)),
        (INTERACTIVE, (2.1, 2.2), (0, 1)),  # TTFT
        (INTERACTIVE, (1.0, 1.2), (0, 1)),  # a gap of 200 ms
        (REALTIME, (0.2, 0.24), (1, 0)),
        (REALTIME, (0.4, 0.44), (0, 1)),
        (BATCH, (100.0, 900.0), (1, 0)),  # no promise
    ],
)
def test_both_targets_have_to_be_met(sla, tokens, expected):
    assert verdict(sla, *tokens) == expected
    assert verdict(sla, *tokens, counts=False) == (0, 0)


def test_times_go_to_the_class_of_the_request():
    metrics = SchedulerMetrics()
    meter = SloMeter(metrics)
    meter.begin("r", INTERACTIVE, 10.0)
    for now in (10.5, 10.6, 10.8):
        meter.token("r", now)
    meter.token("stranger", 11.0)
    assert metrics.ttft_seconds["interactive"].total == pytest.approx(0.5)
    assert metrics.itl_seconds["interactive"].total == pytest.approx(0.3)
    assert sum(metrics.itl_seconds["interactive"].counts) == 2
    assert sum(metrics.ttft_seconds["realtime"].counts) == 0


def test_each_answer_of_a_session_counts_and_waiting_for_input_is_no_gap():
    metrics = SchedulerMetrics()
    meter = SloMeter(metrics)
    meter.begin("s", REALTIME, 0.0)
    for began, wait in ((0.0, 0.1), (60.0, 0.2), (100.0, 5.0), (200.0, 0.1)):
        if began:
            meter.input("s", began)
        meter.token("s", began + wait)
        meter.token("s", began + wait + 0.02)
        meter.answered("s")
        meter.answered("s")  # it is idle: nothing has ended
    assert (metrics.slo_met["realtime"], metrics.slo_missed["realtime"]) == (3, 1)
    assert metrics.ttft_seconds["realtime"].total == pytest.approx(0.1 + 0.2 + 5.0 + 0.1)
    assert metrics.itl_seconds["realtime"].total == pytest.approx(4 * 0.02)
    meter.end("s", counts=False)  # its client has gone
    assert (metrics.slo_met["realtime"], metrics.slo_missed["realtime"], len(meter)) == (3, 1, 0)


def test_inputs_that_come_during_an_answer_wait_from_when_they_came():
    metrics = SchedulerMetrics()
    meter = SloMeter(metrics)
    meter.begin("s", REALTIME, 0.0)
    meter.token("s", 0.1)
    meter.input("s", 0.11)
    meter.token("s", 0.12)  # of the first answer
    meter.input("s", 0.13)
    meter.answered("s")
    meter.token("s", 0.15)
    meter.answered("s")
    meter.token("s", 0.2)
    meter.end("s", counts=True)
    assert metrics.ttft_seconds["realtime"].total == pytest.approx(0.1 + 0.04 + 0.07)
    assert metrics.itl_seconds["realtime"].total == pytest.approx(0.02)
    assert (metrics.slo_met["realtime"], metrics.slo_missed["realtime"], len(meter)) == (3, 0, 0)


def test_costs_are_learnt_per_modality():
    costs = CostModel()
    assert costs.encode_seconds("image", 100) == costs.prefill_seconds(100) == 0.0
    costs.encoded("image", 100, 1.0)
    costs.encoded("image", 100, 2.0)
    assert costs.encode_seconds("image", 10) == pytest.approx(0.12)
    assert costs.encode_seconds("audio", 10) == pytest.approx(0.12)  # what all cost
    costs.encoded("audio", 10, 0.01)
    assert costs.encode_seconds("audio", 10) == pytest.approx(0.01)
    costs.prefilled(1000, 0.5)
    assert costs.prefill_seconds(10) == pytest.approx(0.005)


def test_steps_are_predicted_by_their_prompt_tokens():
    meter, now = StepMeter(), 0.0
    meter.step(now, 1, 0)
    for i in range(200):
        tokens, rest = (i % 4) * 100, 0.03 if i % 2 else 0.0
        now += 0.005 + 0.0001 * tokens + rest
        assert meter.step(now, 1, tokens, rest_seconds=rest) == pytest.approx(0.005 + 0.0001 * tokens)
    assert meter.predict(0) == pytest.approx(0.005, abs=1e-3)
    assert meter.predict(400) == pytest.approx(0.045, rel=0.05)


def test_idle_time_and_encodes_teach_nothing():
    meter = StepMeter()
    meter.step(0.0, 1, 0)
    assert meter.step(0.01, 0, 0) is None  # the last request has ended
    assert meter.step(60.0, 1, 0) is None  # the next one comes much later
    assert meter.step(61.0, 1, 0, encoded=True) is None
    assert meter.predict(100) == 0.0
