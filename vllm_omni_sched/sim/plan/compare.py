"""Find the plans of stock and of ours, and compare those that meet the SLO with the held-out requests."""

from typing import NamedTuple

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.plan.findings import Confirmed, confirm
from vllm_omni_sched.sim.plan.load import Load
from vllm_omni_sched.sim.plan.search import Plan, Planner
from vllm_omni_sched.sim.plan.systems import Choices
from vllm_omni_sched.sim.scenario.scenario import Slo


class Trials(NamedTuple):
    """Trials of a search, by what was searched."""

    stock: int
    ours: int


class PlansFound(NamedTuple):
    """Holds the plans that were found.

    ``stock``: at its best; None if it never meets the SLO with the held-out requests. ``ours``: if it meets the SLO,
    and stock does not or costs more. ``shipped``: the devices of stock's best with vLLM's default flags.
    ``together``: if stock is best with prefill replicas, its best without. ``missed``: the cheapest plan of stock that
    met the SLO in training alone, if there is one and stock never meets it with the held-out requests.
    """

    stock: Confirmed | None
    ours: Confirmed | None = None
    shipped: Confirmed | None = None
    together: Confirmed | None = None
    missed: Confirmed | None = None
    trials: Trials = Trials(0, 0)

    @property
    def best(self) -> Confirmed:
        """Return the cheapest plan that meets the SLO."""
        best = self.ours or self.stock
        assert best is not None
        return best


def find_plans(planner: Planner, choices: Choices, load: Load, slo: Slo) -> PlansFound:
    """Search, confirm and compare.

    1. A plan counts if it meets the SLO with the held-out requests, with more replicas if they are needed.
    2. A way to serve on which stock misses it up to the limit of devices is left out, and the search goes on with the
       others; and so it is for ours.
    3. Our options count if they meet it for less than stock, or if stock does not meet it, not even in training.

    Raises:
        ConfigError: no plan meets the SLO, in training or with the held-out requests.
    """
    in_training: Plan | None = None
    stock: Confirmed | None = None
    missed: Confirmed | None = None
    why_none = ""
    try:
        in_training, stock, missed = _stock(planner, choices, load, slo)
    except ConfigError as error:
        why_none = str(error)
    of_stock = planner.tally.trials
    found = PlansFound(stock, missed=None if stock is not None else missed)
    one_pool = planner.together
    if stock is not None and stock.plan.system.prefill is not None and one_pool is not None:
        together = confirm(choices, load, slo, one_pool)
        if _meets(together, slo) and together.plan.price <= stock.plan.price:
            stock = together  # the held-out requests took away what the split had saved
        else:
            found = found._replace(together=together)
        found = found._replace(stock=stock)
    ours = _ours(planner, choices, load, slo, in_training)
    of_ours = planner.tally.trials - of_stock
    if ours is not None and (stock is None or ours.plan.price < stock.plan.price):
        found = found._replace(ours=ours)
    if found.stock is None and found.ours is None:
        if missed is None:
            raise ConfigError(f"{why_none}; with options of this package, no plan meets it either")
        raise ConfigError(
            f"no plan with up to {choices.most_devices} devices meets the SLO with the held-out requests: "
            f"{missed.plan.devices} x {missed.plan.system.layout.device} reach {missed.attainment:.1%}, and "
            f"{slo.attainment:.0%} are needed: raise --max-gpus, name larger devices, or loosen the SLO"
        )
    default = planner.as_shipped((found.together or found.stock or found.best).plan.system.layout)
    shipped = None if default is None else confirm(choices, load, slo, default)
    return found._replace(shipped=shipped, trials=Trials(of_stock, of_ours))


def _meets(one: Confirmed, slo: Slo) -> bool:
    return one.attainment >= slo.attainment


def _stock(
    planner: Planner, choices: Choices, load: Load, slo: Slo
) -> tuple[Plan | None, Confirmed | None, Confirmed | None]:
    """Return stock's cheapest plan that meets the SLO with the held-out requests, and the first that does not.

    The plan is returned as it was in training, and as it was confirmed.

    Raises:
        ConfigError: none meets it in training.
    """
    missed: Confirmed | None = None
    searched = planner.stock()
    while True:
        one = confirm(choices, load, slo, searched)
        if _meets(one, slo):
            return searched, one, missed
        missed = missed or one
        planner.leave_out(searched.system)
        try:
            searched = planner.stock()
        except ConfigError:
            return None, None, missed


def _ours(planner: Planner, choices: Choices, load: Load, slo: Slo, stock: Plan | None) -> Confirmed | None:
    """Return our cheapest plan that meets the SLO with the held-out requests, if one was cheaper than stock's."""
    while (searched := planner.ours(stock)) is not None:
        one = confirm(choices, load, slo, searched)
        if _meets(one, slo):
            return one
        planner.leave_out(searched.system)
    return None
