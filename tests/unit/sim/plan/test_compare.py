"""Only plans that meet the SLO with the held-out requests are compared."""

import pytest

from tests.unit.sim.plan.test_search import SLO, a_load, all_choices
from tests.unit.sim.plan.test_split import with_link
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.plan import findings
from vllm_omni_sched.sim.plan import search as searching
from vllm_omni_sched.sim.plan.compare import find_plans
from vllm_omni_sched.sim.plan.search import Planner
from vllm_omni_sched.sim.plan.trial import Served

ENOUGH = {"a100-80gb": 4, "h100-80gb": 2}
"""Replicas of stock that suffice in training."""


@pytest.fixture
def ruled(monkeypatch):
    """Replace simulations by rules: the replicas that suffice in training, and with the held-out requests."""

    def rule(load, training, held_out):
        def served(of, system, part, whole):
            every = len(load.part(1, 0, held_out=whole).requests)
            replicas = round(every / max(len(part.requests), 1))
            met = replicas >= of(system)
            cells = ((10, 10),) if met else ((7, 10),)
            return Served(len(part.requests), 1.0 if met else 0.7, cells)

        monkeypatch.setattr(
            searching, "serve", lambda choices, system, part, slo: served(training, system, part, False)
        )
        monkeypatch.setattr(
            findings,
            "serve",
            lambda choices, system, part, slo, whole, better="": served(held_out, system, part, whole),
        )

    return rule


def of_device(system):
    return ENOUGH[system.layout.device]


def found(choices, load):
    return find_plans(Planner(choices, load, SLO), choices, load, SLO)


def test_a_plan_that_misses_the_held_out_requests_at_the_limit_is_no_plan(ruled):
    load, choices = a_load(), all_choices("a100-80gb", most=4)
    ruled(load, of_device, lambda system: 99)
    with pytest.raises(ConfigError) as error:
        found(choices, load)
    assert str(error.value) == (
        "no plan with up to 4 devices meets the SLO with the held-out requests: 4 x a100-80gb reach 70.0%, and 95% are "
        "needed: raise --max-gpus, name larger devices, or loosen the SLO"
    )


def test_the_search_goes_on_where_the_cheapest_misses_them(ruled):
    load, choices = a_load(), all_choices("a100-80gb", "h100-80gb", most=4)
    ruled(load, of_device, lambda system: 99 if system.layout.device == "a100-80gb" else 2)
    plans = found(choices, load)
    assert (plans.stock.plan.system.layout.device, plans.stock.plan.devices) == ("h100-80gb", 2)
    assert plans.best is plans.stock
    assert plans.missed is None


def test_our_options_are_tried_where_stock_meets_the_slo_nowhere_in_training(ruled):
    load, choices = a_load(), all_choices("a100-80gb", most=4)
    ruled(load, lambda system: 3 if system.options else 99, lambda system: 4 if system.options else 99)
    plans = found(choices, load)
    assert (plans.stock, plans.missed, plans.shipped, plans.together) == (None, None, None, None)
    assert plans.best is plans.ours
    assert plans.ours.plan.devices == 4
    assert plans.trials.ours > 0
    ruled(load, lambda system: 99, lambda system: 99)
    with pytest.raises(ConfigError) as error:
        found(choices, load)
    assert str(error.value).startswith("no plan of stock vLLM with up to 4 devices meets the SLO in training: of ")
    assert str(error.value).endswith("loosen the SLO; with options of this package, no plan meets it either")


def test_ours_wins_only_where_it_meets_them(ruled):
    load, choices = a_load(), all_choices("a100-80gb", most=4)

    def training(system):
        return 3 if system.options else 4

    ruled(load, training, lambda system: 99 if system.options else 4)
    plans = found(choices, load)
    assert plans.ours is None
    assert plans.best is plans.stock
    ruled(load, training, lambda system: 3 if system.options else 4)
    plans = found(choices, load)
    assert plans.best is plans.ours
    assert (plans.ours.plan.replicas, plans.stock.plan.replicas) == (3, 4)
    assert plans.trials.stock > 0
    assert plans.trials.ours > 0


def test_ours_is_the_plan_where_stock_alone_misses_them(ruled):
    load, choices = a_load(), all_choices("a100-80gb", most=4)
    ruled(load, lambda system: 4, lambda system: 4 if system.options else 99)
    plans = found(choices, load)
    assert plans.stock is None
    assert plans.best is plans.ours
    assert (plans.missed.plan.devices, plans.missed.attainment) == (4, pytest.approx(0.7))


def test_the_search_for_ours_goes_on_where_its_cheapest_misses_them(ruled):
    load, choices = a_load(), all_choices("a100-80gb", "h100-80gb", most=4)

    def held_out(system):
        return 2 if system.options and system.layout.device == "h100-80gb" else 99

    ruled(load, of_device, held_out)
    plans = found(choices, load)
    assert plans.stock is None
    assert (plans.ours.plan.system.layout.device, plans.ours.plan.devices) == ("h100-80gb", 2)
    assert plans.best is plans.ours


def test_one_pool_wins_where_the_held_out_requests_took_away_what_a_split_had_saved(ruled):
    load, choices = a_load(rate=2.0), with_link("a100-80gb", most=8)

    def training(system):
        return 2 if system.prefill is not None else 5

    def held_out(system):
        return 4 if system.prefill is not None else 5

    ruled(load, training, held_out)
    plans = found(choices, load)
    assert plans.stock.plan.system.prefill is None
    assert plans.together is None
