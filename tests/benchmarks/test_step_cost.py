"""The step benchmark: its scenarios on the installed vLLM, and the run with workers that are not real."""

import pytest

from benchmarks.step_cost import report
from benchmarks.step_cost.__main__ import SCENARIOS as OFFERED
from benchmarks.step_cost.measure import Cell, measure
from benchmarks.step_cost.variants import Variant

STOCK, OURS = Variant("0.32.0", "stock"), Variant("0.32.0", "ours")


def run(workers, plan, **options):
    told = []
    settings = {"rounds": 3, "cell_seconds": 1.0, "seed": 0, "progress": lambda what, size: told.append(what)}
    rows = measure(workers, plan, **settings | options)
    return [cell for row in rows for cell in row], told


def cell(variant, size, seconds, scenario="realtime_frame"):
    return Cell(variant, scenario, size, rounds=[seconds] * 3, samples=[seconds] * 3)


def test_the_ratio_is_taken_round_by_round():
    stock = Cell(STOCK, "decode", 64, rounds=[1.0, 2.0, 4.0], samples=[1.0])
    ours = Cell(OURS, "decode", 64, rounds=[1.1, 2.2, 9.9], samples=[1.0])
    assert report.ratio_to_stock([stock, ours], OURS, 64) == pytest.approx(1.1)
    assert report.ratio_to_stock([ours], OURS, 64) is None


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("kind", ["stock", "ours"])
@pytest.mark.parametrize("runner_v2", [False, True], ids=["v1", "v2"])
def test_a_scenario_runs(name, kind, runner_v2):
    pytest.importorskip("vllm")
    import vllm_omni_sched
    from benchmarks.step_cost.scenarios import SCENARIOS

    scenario = SCENARIOS[name](None if kind == "stock" else vllm_omni_sched.OmniScheduler, 8, runner_v2=runner_v2)
    assert (type(scenario.scheduler).__module__.partition(".")[0] == "vllm") is (kind == "stock")
    assert scenario.scheduler.use_v2_model_runner is runner_v2
    before = scenario.timed.seconds
    assert scenario.sample() > 0
    assert scenario.sample() > 0
    assert scenario.timed.seconds > before
    scenario.close()
    assert not scenario.scheduler.requests


def test_our_message_does_not_grow_with_the_session_and_vllms_does():
    pytest.importorskip("vllm")
    import vllm_omni_sched
    from benchmarks.step_cost.scenarios import RealtimeFrame

    def growth(scheduler_cls):
        sizes = []
        for held in (8, 512):
            scenario = RealtimeFrame(scheduler_cls, held)
            sizes.append(scenario.message_bytes())
            scenario.close()
        return sizes[1] - sizes[0]

    assert growth(None) > 10_000
    assert abs(growth(vllm_omni_sched.OmniScheduler)) < 64
