"""Measure a plan with held-out requests: how sure it is, which resource limits it, and how much more it would take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.sim.plan.load import Load
from vllm_omni_sched.sim.plan.search import Plan
from vllm_omni_sched.sim.plan.systems import Choices
from vllm_omni_sched.sim.plan.trial import Served, serve
from vllm_omni_sched.sim.scenario.scenario import Slo

HELD_OUT = 1000
"""The first held-out seed; those below are for training."""
_DRAWS = 4000
_FASTER = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
RESOURCES = ("compute", "memory bandwidth", "KV memory", "links between devices", "host")
KV_LINKS = "links for KV caches"
"""A resource of plans with prefill replicas."""


@dataclass(frozen=True)
class Confirmed:
    """A plan under held-out requests.

    ``low``, ``high``: 95 % interval of ``attainment``, by a bootstrap over blocks of time. ``sure``: fraction of the
    draws in which the SLO is met. ``runs``: of one replica each. ``added``: replicas that the held-out requests needed
    more than training.
    """

    plan: Plan
    attainment: float
    low: float
    high: float
    sure: float
    runs: tuple[Served, ...]
    added: int = 0


@dataclass(frozen=True)
class Limit:
    """What limits a plan.

    ``faster``: factor on the load at which it fails first; None if it never did. ``gains``: by resource, what twice as
    much of it adds to the attainment there. ``resource``: the one that adds the most; empty if none adds anything.
    """

    faster: float | None
    held: float
    attainment: float
    gains: dict[str, float]
    resource: str


def confirm(choices: Choices, load: Load, slo: Slo, plan: Plan, seeds: int = 4) -> Confirmed:
    """Run a plan under held-out requests, with more replicas if they are needed, up to the limit of devices.

    Of prefill and decode replicas, one of the kind is added that brings more requests within the SLO.
    """
    added = 0
    found = _held_out(choices, load, slo, plan, seeds, added)
    while found.attainment < slo.attainment:
        added += 1
        larger = [one for one in _with_one_more(found.plan) if one.devices <= choices.most_devices]
        if not larger:
            break
        tried = [_held_out(choices, load, slo, one, seeds, added) for one in larger]
        found = max(tried, key=lambda one: one.attainment)
    return found


def _with_one_more(plan: Plan) -> list[Plan]:
    """Return the plan with another replica; with prefill replicas, with one of either kind."""
    system = plan.system
    if system.prefill is None:
        return [replace(plan, replicas=plan.replicas + 1)]
    prefills, decodes = plan.replicas * system.prefill.replicas, plan.replicas * system.prefill.decodes
    larger = [system.apart(prefills + 1, decodes), system.apart(prefills, decodes + 1)]
    return [Plan(one, groups, plan.attainment) for one, groups in larger]


def _held_out(choices: Choices, load: Load, slo: Slo, plan: Plan, seeds: int, added: int) -> Confirmed:
    phases = range(HELD_OUT, HELD_OUT + min(seeds, plan.replicas))
    runs = tuple(
        serve(choices, plan.system, load.part(plan.replicas, seed, held_out=True), slo, whole=True) for seed in phases
    )
    cells = [cell for run in runs for cell in run.by_block]
    within, number = sum(cell[0] for cell in cells), sum(cell[1] for cell in cells)
    draws = _bootstrap(cells)
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    return Confirmed(plan, within / max(number, 1), low, high, float((draws >= slo.attainment).mean()), runs, added)


def _bootstrap(cells: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64]:
    """Return the attainment of draws of blocks with replacement, with a fixed seed."""
    table = np.array(cells or [(0, 1)], dtype=float)
    rng = np.random.default_rng(0)
    drawn = table[rng.integers(0, len(table), (_DRAWS, len(table)))].sum(axis=1)
    found: npt.NDArray[np.float64] = drawn[:, 0] / drawn[:, 1]
    return found


def limit(choices: Choices, load: Load, slo: Slo, plan: Plan) -> Limit:
    """Raise the load until the plan fails, and see there of which resource twice as much helps the most."""
    held = 1.0
    for faster in _FASTER:
        part = load.part(plan.replicas, HELD_OUT, held_out=True, faster=faster)
        at = serve(choices, plan.system, part, slo, whole=True).attainment
        if at < slo.attainment:
            known: tuple[str, ...] = RESOURCES if choices.calibration is None else ("KV memory",)
            known += (KV_LINKS,) if plan.system.prefill is not None else ()
            more = {name: serve(choices, plan.system, part, slo, whole=True, better=name).attainment for name in known}
            gains = {name: value - at for name, value in more.items()}
            largest = max(gains, key=lambda name: gains[name])
            return Limit(faster, held, at, gains, largest if gains[largest] > 0 else "")
        held = faster
    return Limit(None, held, at, {}, "")
