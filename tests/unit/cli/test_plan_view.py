"""The page of a plan with prefill replicas."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from tests.unit.sim.costs.test_measured import FILE
from tests.unit.sim.plan.test_search import SLO, a_load
from tests.unit.sim.plan.test_split import ONE, apart, with_link
from vllm_omni_sched.cli import plan_view
from vllm_omni_sched.sim.costs import errors
from vllm_omni_sched.sim.costs.calibration import Calibration
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.costs.models import Precision, WeightFormat
from vllm_omni_sched.sim.plan.compare import PlansFound
from vllm_omni_sched.sim.plan.findings import Limit, confirm, limit
from vllm_omni_sched.sim.plan.search import Plan
from vllm_omni_sched.sim.plan.systems import Flags, System

pytestmark = pytest.mark.once  # nothing here reaches vLLM


def said_by(choices, load, slo, found, limited=Limit(2.0, 1.5, 0.9, {}, "")):  # noqa: B008 (frozen)
    console = Console(width=400, highlight=False, record=True)
    console.print(plan_view.page(choices, load, slo, found, limited, []))
    return " ".join(console.export_text().split())


def test_the_page_of_prefill_replicas_has_both_numbers_the_link_and_two_commands():
    load, choices = a_load(), with_link("a100-80gb")
    system, groups = apart(4, 2)
    one = confirm(choices, load, SLO, Plan(system, groups, 1.0), seeds=1)
    assert one.added == 0
    found = PlansFound(one)
    limited = limit(choices, load, SLO, one.plan)
    said = said_by(choices, load, SLO, found, limited)
    assert said.startswith("6 x a100-80gb (4 prefill and 2 decode replicas, 4P2D), $7.80 per hour")
    assert "KV caches go over ethernet-400g, 50 GB/s for each GPU: IEEE 802.3, 400 Gbit/s." in said
    assert "4 prefill and 2 decode replicas, behind a proxy" in said
    assert "a100-80gb 1.30 (published)" in said
    first, second = plan_view.command_of(choices, one).splitlines()
    assert "kv_producer" in first
    assert "kv_consumer" in second
    body = plan_view.record(choices, load, SLO, found, limited, [], [])
    plan = body["plans"]["stock at its best"]
    assert (plan["prefill"]["replicas"], plan["replicas"], plan["devices"]) == (4, 2, 6)


def test_the_page_says_which_plan_misses_the_slo_with_the_held_out_requests():
    load, choices = a_load(), with_link("a100-80gb")
    one = confirm(choices, load, SLO, Plan(System(ONE, Flags(8192, 256)), 2, 1.0), seeds=1)
    low = replace(one, attainment=0.9)
    said = said_by(choices, load, SLO, PlansFound(None, ours=one, shipped=low, missed=low))
    assert "stock, misses the SLO" in said
    assert "Stock does not meet the SLO with the held-out requests within the limit of GPUs" in said
    assert "Our options save" not in said
    assert "Stock does not meet the SLO in training within" in said_by(choices, load, SLO, PlansFound(None, ours=one))
    assert "With the flags as shipped, stock does not meet the SLO" in said
    system, groups = apart(1, 1)
    split = confirm(choices, load, SLO, Plan(system, groups, 1.0), seeds=1)
    said = said_by(choices, load, SLO, PlansFound(split, together=low, shipped=low))
    assert "One pool of stock does not meet the SLO within the limit of GPUs" in said
    assert "Prefill replicas of their own save" not in said


def test_the_page_has_the_known_errors_and_the_notes():
    load, choices = a_load(), replace(with_link("a100-80gb"), notes=("Mind this.",))
    one = confirm(choices, load, SLO, Plan(System(ONE, Flags(8192, 256)), 2, 1.0), seeds=1)
    said = said_by(choices, load, SLO, PlansFound(one))
    assert errors.roofline_error() in said
    assert "Mind this." in said
    body = plan_view.record(choices, load, SLO, PlansFound(one), Limit(2.0, 1.5, 0.9, {}, ""), [], [])
    assert (body["error_of_costs"], body["notes"]) == (errors.roofline_error(), ["Mind this."])
    fp8 = replace(choices, precision=Precision(WeightFormat.FP8))
    assert "This plan has fp8 weights: how far costs of these are off is not known." in said_by(
        fp8, load, SLO, PlansFound(one)
    )


@pytest.mark.parametrize(("per_output", "said_of"), [(0.0, errors.engine_error), (1e-4, errors.served_error)])
def test_the_page_has_the_errors_of_the_way_to_calibrate(per_output, said_of):
    load, choices = a_load(), with_link("a100-80gb")
    one = confirm(choices, load, SLO, Plan(System(ONE, Flags(8192, 256)), 2, 1.0), seeds=1)
    file = {**FILE, "frontend": {**FILE["frontend"], "per_output": per_output}}
    costs = MeasuredCosts(Calibration.model_validate_json(json.dumps(file)))
    calibrated = replace(choices, shape=None, calibration=costs, link=None)
    assert said_of() in said_by(calibrated, load, SLO, PlansFound(one))
    body = plan_view.record(calibrated, load, SLO, PlansFound(one), Limit(2.0, 1.5, 0.9, {}, ""), [], [])
    assert body["error_of_costs"] == said_of()
