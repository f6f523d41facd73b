"""The page of a plan with prefill replicas."""

import pytest
from rich.console import Console

from tests.unit.sim.plan.test_search import SLO, a_load
from tests.unit.sim.plan.test_split import apart, with_link
from vllm_omni_sched.cli import plan_view
from vllm_omni_sched.sim.plan.findings import confirm, limit
from vllm_omni_sched.sim.plan.search import Plan

pytestmark = pytest.mark.once  # nothing here reaches vLLM


def test_the_page_of_prefill_replicas_has_both_numbers_the_link_and_two_commands():
    load, choices = a_load(), with_link("a100-80gb")
    system, groups = apart(4, 2)
    one = confirm(choices, load, SLO, Plan(system, groups, 1.0), seeds=1)
    assert one.added == 0
    found = plan_view.Found(one)
    limited = limit(choices, load, SLO, one.plan)
    console = Console(width=400, highlight=False, record=True)
    console.print(plan_view.page(choices, load, SLO, found, limited, []))
    said = console.export_text()
    assert said.startswith("6 x a100-80gb (4 prefill and 2 decode replicas, 4P2D), $7.80 per hour")
    assert "KV caches go over ethernet-400g, 50 GB/s for each GPU: IEEE 802.3, 400 Gbit/s." in said
    assert "4 prefill and 2 decode replicas, behind a proxy" in said
    assert "a100-80gb 1.30 (published)" in said
    first, second = plan_view.command_of(choices, one).splitlines()
    assert "kv_producer" in first
    assert "kv_consumer" in second
    body = plan_view.record(choices, load, SLO, found, limited, (1, 1), [], [])
    plan = body["plans"]["stock at its best"]
    assert (plan["prefill"]["replicas"], plan["replicas"], plan["devices"]) == (4, 2, 6)
