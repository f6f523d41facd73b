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
    """Run a plan under held-out requests, with more replicas if they are needed, up to the limit of devices."""
    most = choices.most_devices // plan.system.layout.parallel.devices
    added = 0
    while True:
        found = _held_out(choices, load, slo, plan, seeds, added)
        if found.attainment >= slo.attainment or plan.replicas >= most:
            return found
        plan, added = replace(plan, replicas=plan.replicas + 1), added + 1


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
            known = RESOURCES if choices.calibration is None else ("KV memory",)
            more = {name: serve(choices, plan.system, part, slo, whole=True, better=name).attainment for name in known}
            gains = {name: value - at for name, value in more.items()}
            largest = max(gains, key=lambda name: gains[name])
            return Limit(faster, held, at, gains, largest if gains[largest] > 0 else "")
        held = faster
    return Limit(None, held, at, {}, "")
