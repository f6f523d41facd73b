"""Prefill replicas are searched for what is cheaper than one pool, and their plans are counted in groups."""

from dataclasses import replace

import pytest

from tests.unit.sim.plan.test_search import SHAPE, SLO, a_load, all_choices
from vllm_omni_sched.sim.costs.hardware import link
from vllm_omni_sched.sim.costs.roofline import Parallel
from vllm_omni_sched.sim.plan import search as searching
from vllm_omni_sched.sim.plan.findings import KV_LINKS, confirm, limit
from vllm_omni_sched.sim.plan.load import Load, Patience
from vllm_omni_sched.sim.plan.search import Plan, Planner
from vllm_omni_sched.sim.plan.systems import (
    Drafter,
    Flags,
    Layout,
    Prefill,
    System,
    command,
    draft_of_a_layer,
)
from vllm_omni_sched.sim.plan.trial import Served, serve
from vllm_omni_sched.sim.workloads.replay import TraceOptions
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, Trace

ONE = Layout("a100-80gb", Parallel(), 1.3)
LINK = link("ethernet-400g")


def with_link(*kinds, most=16, **more):

    return replace(all_choices(*kinds, most=most), link=LINK, **more)


def apart(prefills=1, decodes=1, layout=ONE, **flags):
    return System(layout, Flags(8192, 256), None, Prefill(layout, Flags(8192, 256, **flags))).apart(prefills, decodes)


def test_groups_are_of_replicas_that_have_to_do_with_each_other():
    system, groups = apart(4, 2)
    assert (system.prefill.replicas, system.prefill.decodes, groups) == (2, 1, 2)
    assert (system.devices, system.price) == (3, pytest.approx(3.9))
    two = Layout("a100-80gb", Parallel(2), 1.3)
    assert apart(3, 2, two)[0].devices == 10


def test_a_group_has_the_requests_of_its_part():
    """The requests of two groups of 1P1D are those that each of them gets of 2P2D in turn."""
    load, choices = a_load(), with_link("a100-80gb")
    whole = System(ONE, Flags(8192, 256), None, Prefill(ONE, Flags(8192, 256), 2, 2))
    one, _ = apart(1, 1)
    both = serve(choices, whole, load.part(1, 0), SLO, whole=True)
    parts = [serve(choices, one, load.part(2, seed), SLO, whole=True) for seed in range(2)]
    assert both.requests == sum(part.requests for part in parts)
    assert both.attainment * both.requests == pytest.approx(sum(part.attainment * part.requests for part in parts))


def test_a_prompt_disturbs_no_decode_step():
    load, choices = a_load(), with_link("a100-80gb")
    together = serve(choices, System(ONE, Flags(8192, 256)), load.part(2, 0), SLO, whole=True)
    split = serve(choices, apart(1, 1)[0], load.part(1, 0), SLO, whole=True)
    assert split.gap_p99 < together.gap_p99
    assert split.prefill_busy > 0
    assert together.prefill_busy is None


@pytest.fixture
def ruled(monkeypatch):
    """Replace simulations by a rule: attainment from the numbers of replicas of each kind, by the requests."""

    def rule(load, wants, together=0.5):
        total = len(load.part(1, 0).requests)

        def served(choices, system, part, slo, whole=False, better=""):
            if system.prefill is None:
                return Served(len(part.requests), 1.0 if len(part.requests) * 8 <= total + 8 else together)
            groups = round(total / max(len(part.requests), 1))
            prefills, decodes = groups * system.prefill.replicas, groups * system.prefill.decodes
            missing = max(0, wants[0] - prefills) + max(0, wants[1] - decodes)
            return Served(len(part.requests), 1.0 - 0.1 * missing)

        monkeypatch.setattr(searching, "serve", served)

    return rule


@pytest.mark.parametrize("wants", [(1, 4), (4, 1), (2, 3)])
def test_the_ratio_is_found_and_the_fewest_replicas(ruled, wants):
    load = a_load(rate=2.0)
    ruled(load, wants)
    planner = Planner(with_link("a100-80gb"), load, SLO)
    found = planner.stock()
    assert planner.together.replicas == 8
    assert found.devices == 5
    numbers = found.system.prefill
    assert (numbers.replicas * found.replicas, numbers.decodes * found.replicas) == wants


def test_one_pool_stays_where_a_split_is_no_cheaper(ruled):
    load = a_load(rate=2.0)
    ruled(load, (4, 4))
    found = Planner(with_link("a100-80gb"), load, SLO).stock()
    assert found.system.prefill is None
    assert found.replicas == 8


def test_without_a_link_no_split_is_tried(ruled):
    load = a_load(rate=2.0)
    ruled(load, (1, 1))
    assert Planner(all_choices("a100-80gb"), load, SLO).stock().system.prefill is None


def test_a_plan_is_confirmed_with_a_replica_of_the_kind_that_is_missing():
    load, choices = a_load(rate=8.0), with_link("a100-80gb")
    few = confirm(choices, load, SLO, Plan(apart(1, 1)[0], 1, 0.0), seeds=1)
    assert few.added >= 1
    assert few.attainment >= SLO.attainment
    assert few.plan.devices == 2 + few.added
    limited = limit(choices, load, SLO, few.plan)
    assert limited.faster is None or KV_LINKS in limited.gains


def test_a_slow_link_is_the_limit():

    load, slow = a_load(), with_link("a100-80gb")
    slow = replace(slow, link=replace(LINK, bytes_per_second=1e9))
    fast = serve(with_link("a100-80gb"), apart(2, 2)[0], load.part(2, 0), SLO, whole=True)
    at = serve(slow, apart(2, 2)[0], load.part(2, 0), SLO, whole=True)
    assert at.ttft_p50 > fast.ttft_p50
    assert serve(slow, apart(2, 2)[0], load.part(2, 0), SLO, whole=True, better=KV_LINKS).ttft_p50 < at.ttft_p50


def test_the_commands_of_both_kinds():
    first, second = command(with_link("a100-80gb"), apart(2, 1)[0]).splitlines()
    assert first.endswith("""--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'""")
    assert second.endswith("""--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'""")


def test_speculation_is_a_flag_that_is_tuned_for_stock(monkeypatch):
    load = a_load()

    def served(choices, system, part, slo, whole=False, better=""):
        return Served(len(part.requests), {0: 0.3, 2: 0.99, 4: 0.5}.get(system.flags.num_speculative_tokens, 0.4))

    monkeypatch.setattr(searching, "serve", served)

    choices = replace(all_choices("a100-80gb"), drafter=Drafter("eagle3", 0.7, 0.05, "a drafter"))
    found = Planner(choices, load, SLO).stock()
    assert found.system.flags.num_speculative_tokens == 2
    assert (
        """--speculative-config '{"method": "eagle3", "num_speculative_tokens": 2, "model": "a drafter"}'"""
        in command(choices, found.system)
    )


def test_speculation_makes_gaps_per_token_shorter_and_a_drafter_takes_memory():

    load = a_load()
    choices = replace(all_choices("a100-80gb"), drafter=Drafter("eagle3", 0.8, 0.05, "a drafter"))
    slo = SLO.model_copy(update={"itl_of": "mean", "itl_seconds": 0.012})
    without, with_drafts = (
        serve(choices, System(ONE, Flags(2048, 256, num_speculative_tokens=number)), load.part(3, 0), slo, whole=True)
        for number in (0, 3)
    )
    assert without.attainment < with_drafts.attainment
    flags = Flags(num_speculative_tokens=3)
    assert choices.costs(ONE, flags).kv_tokens < choices.costs(ONE, Flags()).kv_tokens
    assert not choices.accepted(System(ONE, Flags(1024, 1024, num_speculative_tokens=1)))
    assert not choices.accepted(System(Layout("a100-80gb", Parallel(1, 2), 1.3), flags))


def test_the_draft_of_a_layer_is_the_part_of_the_weights():
    llm = SHAPE.llm
    part = draft_of_a_layer(SHAPE)
    assert part == pytest.approx(
        (llm.layer_parameters / 28 + llm.head_parameters) / (llm.layer_parameters + llm.head_parameters)
    )


def test_clients_that_give_up_are_missed_and_leave_room_for_others():
    # prompts of two thirds of a second, two a second
    requests = tuple(Exact(0.5 * at, 9000, 2) for at in range(120))
    trace = Trace(Header(FORMAT, VERSION), requests=requests)
    loads = [Load(trace, TraceOptions(file="trace"), patience) for patience in (None, Patience(1.0, 6.0))]
    choices, system = all_choices("a100-80gb"), System(ONE, Flags(8192, 256))
    slo = SLO.model_copy(update={"ttft_seconds": 4.0, "itl_seconds": 5.0})
    endless, patient = (serve(choices, system, load.part(1, 0), slo, whole=True) for load in loads)
    assert endless.gave_up == 0 < patient.gave_up
    # nobody computes for those who have left, so others are served in time
    assert patient.attainment > endless.attainment
    assert patient.attainment <= 1 - patient.gave_up / patient.requests + 1e-9
    assert patient.ttft_p99 <= 6.0
    assert serve(choices, system, loads[1].part(1, 0), slo, whole=True) == patient
    assert serve(choices, system, loads[1].part(1, 0), slo).stopped


def test_patience_is_the_clients_own():
    patience = Patience(2.0, 8.0)
    waits = [patience.seconds(number) for number in range(500)]
    assert waits == [patience.seconds(number) for number in range(500)]
    assert 2.0 <= min(waits) < 2.3 < 7.7 < max(waits) <= 8.0
    assert sum(waits) / len(waits) == pytest.approx(5.0, abs=0.3)
