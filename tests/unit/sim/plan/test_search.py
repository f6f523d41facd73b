"""The search finds the cheapest plan, gives stock its flags first, and repeats itself."""

import random
import re

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.models import Precision, model
from vllm_omni_sched.sim.plan import search as searching
from vllm_omni_sched.sim.plan.findings import Limit, confirm, limit
from vllm_omni_sched.sim.plan.load import Load
from vllm_omni_sched.sim.plan.search import Planner
from vllm_omni_sched.sim.plan.systems import PRICES, Choices, offer
from vllm_omni_sched.sim.plan.trial import Served, serve
from vllm_omni_sched.sim.scenario.scenario import Slo
from vllm_omni_sched.sim.workloads.replay import TraceOptions
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, Trace

SHAPE = model("qwen2.5-vl-7b")
SLO = Slo(ttft_seconds=2.0, itl_seconds=0.1, attainment=0.95)


def a_load(rate=6.0, seconds=60.0, seed=1):
    rng = random.Random(seed)
    at, entries = 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        entries.append(Exact(at, rng.randrange(200, 4000), rng.randrange(5, 200)))
    return Load(Trace(Header(FORMAT, VERSION), requests=tuple(entries)), TraceOptions(file="trace"))


def all_choices(*kinds, most=16, items=False):
    return Choices(SHAPE, "a model", offer(SHAPE, kinds, PRICES, Precision(), most).layouts, most, items)


@pytest.fixture
def stubbed(monkeypatch):
    """Replace simulations by a rule: attainment from the system and the requests of a replica."""

    def stub(rule):
        def served(choices, system, part, slo, whole=False, better=""):
            return Served(len(part.requests), rule(system, part))

        monkeypatch.setattr(searching, "serve", served)

    return stub


def test_the_cheapest_layout_and_the_fewest_replicas_win(stubbed):
    load = a_load()
    total = len(load.part(1, 0).requests)
    # an A100 serves a third of the requests, an H100 half of them: 3 x 1.3 is less than 2 x 3.0
    parts = {"a100-80gb": 3, "h100-80gb": 2}

    def rule(system, part):
        return 1.0 if len(part.requests) * parts[system.layout.device] <= total + 2 else 0.5

    stubbed(rule)
    found = Planner(all_choices("a100-80gb", "h100-80gb"), load, SLO).stock()
    assert (found.system.layout.device, found.replicas) == ("a100-80gb", 3)
    assert found.price == pytest.approx(3 * PRICES["a100-80gb"])


def test_flags_are_tuned_first_and_only_what_is_left_is_ours(stubbed):
    load = a_load()
    total = len(load.part(1, 0).requests)

    def rule(system, part):
        power = 1 + (system.flags.max_num_batched_tokens == 512) + (system.flags.max_num_seqs == 512)
        power += bool(system.options) and system.options.get("prefill_control") == "pid"
        return 1.0 if len(part.requests) * 6 <= power * (total + 6) else min(0.9, 0.6 + 0.1 * power)

    stubbed(rule)
    planner = Planner(all_choices("a100-80gb"), load, SLO)
    stock = planner.stock()
    assert (stock.replicas, stock.system.options) == (2, None)
    assert (stock.system.flags.max_num_batched_tokens, stock.system.flags.max_num_seqs) == (512, 512)
    shipped = planner.as_shipped(stock.system.layout)
    assert shipped.replicas == 6
    assert planner.ours(stock) is None  # 1.5 replicas are no plan


def test_our_options_win_where_they_save_a_replica(stubbed):
    load = a_load()
    total = len(load.part(1, 0).requests)

    def rule(system, part):
        power = 2 + (bool(system.options) and system.options.get("waiting_order") == "sla")
        return 1.0 if len(part.requests) * 6 <= power * (total + 3) else 0.6 + 0.1 * power

    stubbed(rule)
    planner = Planner(all_choices("a100-80gb"), load, SLO)
    stock = planner.stock()
    ours = planner.ours(stock)
    assert (stock.replicas, ours.replicas) == (3, 2)
    assert ours.system.options["waiting_order"] == "sla"
    assert ours.system.options["interactive_ttft_ms"] == 2000.0


def test_without_a_plan_the_error_tells_the_best_that_was_tried(stubbed):
    stubbed(lambda system, part: 0.94999 if system.flags.max_num_seqs == 512 else 0.9)
    planner = Planner(all_choices("a100-80gb"), a_load(), SLO, seeds=1)
    with pytest.raises(ConfigError) as error:
        planner.stock()
    assert str(error.value) == (
        f"no plan of stock vLLM with up to 16 devices meets the SLO in training: of {planner.tally.trials} plans on 3 "
        "layouts that were tried, the best, 16 x a100-80gb, reaches 94.9%, and 95% are needed: raise --max-gpus, "
        "name larger devices, or loosen the SLO"
    )


def test_where_operations_alone_need_more_devices_the_error_tells_how_many(stubbed):
    stubbed(lambda system, part: pytest.fail("nothing can be tried"))
    load = a_load(rate=200.0)
    with pytest.raises(ConfigError) as error:
        Planner(all_choices("a100-80gb", most=1), load, SLO).stock()
    found = re.fullmatch(
        r"no plan with up to 1 devices was tried, as the operations alone need (\d+) x a100-80gb or more: raise .*",
        str(error.value),
    )
    assert found is not None
    assert int(found[1]) > 1


def test_a_real_search_repeats_itself_and_is_confirmed():
    load, choices = a_load(), all_choices("a100-80gb", most=6)
    plans = []
    for _ in range(2):
        planner = Planner(choices, load, SLO, seeds=1, trials=6)
        plans.append((planner.stock(), planner.tally.trials))
    assert plans[0] == plans[1]
    stock = plans[0][0]
    found = confirm(choices, load, SLO, stock, seeds=2)
    assert found.attainment >= SLO.attainment
    assert found.low <= found.attainment <= found.high
    assert found.plan.replicas == stock.replicas + found.added
    limited = limit(choices, load, SLO, found.plan)
    assert isinstance(limited, Limit)
    assert limited.faster is None or limited.faster > 1
    assert limited == limit(choices, load, SLO, found.plan)


def test_a_hopeless_run_is_stopped_and_counts_as_missed():
    load, choices = a_load(rate=40.0), all_choices("a100-80gb")
    from vllm_omni_sched.sim.plan.systems import Flags, System

    system = System(choices.layouts[0], Flags(2048, 256))
    part = load.part(1, 0)
    stopped, whole = serve(choices, system, part, SLO), serve(choices, system, part, SLO, whole=True)
    assert stopped.stopped
    assert not whole.stopped
    assert max(stopped.attainment, whole.attainment) < SLO.attainment
    assert sum(number for _, number in whole.by_block) == whole.requests == len(part.requests)


def test_a_mean_gap_is_easier_to_meet_than_each():
    load, choices = a_load(), all_choices("a100-80gb")
    from vllm_omni_sched.sim.plan.systems import Flags, System

    system = System(choices.layouts[0], Flags(8192, 256))
    each, mean = (
        serve(choices, system, load.part(2, 0), SLO.model_copy(update={"itl_of": of}), whole=True).attainment
        for of in ("each", "mean")
    )
    assert each < mean
