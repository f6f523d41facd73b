"""Search for the cheapest system within an SLO, first without the options of this package, then with them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.hardware import DEVICES
from vllm_omni_sched.sim.plan.load import Load
from vllm_omni_sched.sim.plan.split import PoolSearch
from vllm_omni_sched.sim.plan.systems import Choices, Flags, Layout, System, option_values, shipped
from vllm_omni_sched.sim.plan.trial import serve
from vllm_omni_sched.sim.scenario.scenario import Slo

Progress = Callable[[int, str], None]
"""Function that is called with the number of trials so far, and a text."""

_HOPELESS = 0.5  # of what is needed: after the first group of flags, a layout below that is given up
_CLEAR = 0.05  # so far below what is needed, no other seed is run
_BETTER = 1e-4  # less is no gain


@dataclass(frozen=True)
class Plan:
    """So many replicas of a system, or groups of prefill and decode replicas. ``attainment``: in training."""

    system: System
    replicas: int
    attainment: float

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.replicas * self.system.devices

    @property
    def price(self) -> float:
        """Return the price of an hour."""
        return self.replicas * self.system.price


@dataclass
class Tally:
    """Work of a search: trials, each of which is a simulation of one replica, and the requests in them."""

    trials: int = 0
    requests: int = 0


class Planner:
    """Searches over layouts, replicas, flags and options together.

    1. A layout cannot be cheaper than its operations allow at the load. Layouts are tried in the order of that bound,
       and those whose bound is not below the best price so far are left out.
    2. For each, the largest number of replicas that would be cheaper is tuned until it meets the SLO: flags, then
       options, one group after another, and the best value of each is kept. If none meets it, the layout is left out.
    3. Then the fewest replicas are found by bisection, and tuned again at one less, as long as that succeeds.
    4. Stock is searched first, with flags alone. With our options every layout is searched again in the same way, with
       the same number of trials, from the flags that stock has there: what a flag gives is in both.
    5. A trial is one replica with its part of the training requests, under up to ``seeds`` seeds. Nothing is random:
       the same input gives the same plan.
    6. If prompts may be computed on replicas of their own, that is searched for stock as well (`PoolSearch`), for
       what is cheaper than the best so far.

    Args:
        trials: most trials of a layout at one number of replicas.

    ``together``: after `stock`, the cheapest plan whose replicas compute their own prompts; None if there is none.
    """

    def __init__(
        self,
        choices: Choices,
        load: Load,
        slo: Slo,
        seeds: int = 2,
        trials: int = 24,
        progress: Progress | None = None,
    ) -> None:
        self._choices, self._load, self._slo = choices, load, slo
        self._seeds, self._most, self._progress = seeds, trials, progress
        self._known: dict[tuple[Any, ...], float] = {}
        self.tally = Tally()
        self.together: Plan | None = None
        self._flags: dict[Layout, Flags] = {}
        self._left_out: set[tuple[Layout, bool, bool]] = set()  # with our options; with prefill replicas
        self._bounds = {layout: self._fewest_possible(layout) for layout in choices.layouts}

    def stock(self) -> Plan:
        """Return the cheapest plan of vLLM with its flags tuned.

        Raises:
            ConfigError: no plan that was tried within the limit of devices meets the SLO in training; the message tells
                how near the best one came.
        """
        found = self.together = self._search(None, {}, None)
        if self._choices.link is not None:
            kept = tuple(one for one in self._choices.layouts if (one, False, True) not in self._left_out)
            choices = replace(self._choices, layouts=kept)
            pools = PoolSearch(choices, self._load, self._slo, self._value, self._flags, self._most)
            apart = pools.search(None if found is None else found.price)
            if apart is not None:
                system, replicas = apart
                found = Plan(system, replicas, self._value(system, replicas))
        if found is None:
            raise ConfigError(f"{self._why_none()}: raise --max-gpus, name larger devices, or loosen the SLO")
        return found

    def _why_none(self) -> str:
        """Return what the search for stock has tried, and the best that it found, where that misses the SLO."""
        within = f"with up to {self._choices.most_devices} devices"
        tried = {
            (System(layout, flags, None, prefill), replicas): value
            for (layout, flags, options, prefill, replicas), value in self._known.items()
            if options is None and (layout, False, prefill is not None) not in self._left_out
        }
        if not tried:
            layout = min(self._bounds, key=lambda one: self._bounds[one] * one.parallel.devices)
            least = self._bounds[layout] * layout.parallel.devices
            return f"no plan {within} was tried, as the operations alone need {least} x {layout.device} or more"
        (system, replicas), value = max(tried.items(), key=lambda one: one[1])
        layouts = len({system.layout for system, _ in tried})
        return (
            f"no plan of stock vLLM {within} meets the SLO in training: of {len(tried)} plans on {layouts} "
            f"layout{'s' if layouts > 1 else ''} that were tried, the best, {replicas * system.devices} x "
            f"{system.layout.device}, reaches {math.floor(value * 1e3) / 10:.1f}%, and {self._slo.attainment:.0%} are "
            "needed"
        )

    def leave_out(self, system: System) -> None:
        """Leave a layout out of further searches, for stock or for ours, with prefill replicas or without them."""
        self._left_out.add((system.layout, system.options is not None, system.prefill is not None))

    def ours(self, stock: Plan | None) -> Plan | None:
        """Return the cheapest plan with our options that is cheaper than stock's, if any; None if there is none."""
        slo = self._slo
        options = option_values(slo.ttft_seconds, slo.itl_seconds, self._choices.items)
        return self._search(stock, options, options["targets"][0])

    def as_shipped(self, layout: Layout) -> Plan | None:
        """Return the fewest replicas of a layout with vLLM's default flags; None if the limit does not suffice."""
        system = System(layout, shipped(DEVICES.get(layout.device)))
        most = self._choices.most_devices // layout.parallel.devices
        if self._value(system, most) < self._slo.attainment:
            return None
        return self._bisected(system, self._bounds[layout], most)

    def _search(
        self, best: Plan | None, options: Mapping[str, Sequence[Any]], first: Mapping[str, Any] | None
    ) -> Plan | None:
        found: Plan | None = None
        for layout in sorted(self._bounds, key=lambda one: (self._bounds[one] * one.price_each, one.device)):
            if (layout, first is not None, False) in self._left_out:
                continue
            fewest = self._bounds[layout]
            most = self._choices.most_devices // layout.parallel.devices
            if best is not None:
                most = min(most, math.ceil(best.price / layout.price_each - 1e-9) - 1)
            if most < fewest:
                continue
            flags = self._flags.get(layout, shipped(DEVICES.get(layout.device)))
            one = self._fewest(System(layout, flags, first), fewest, most, options)
            if one is not None:
                best = found = one
        return found

    def _fewest(self, start: System, fewest: int, most: int, options: Mapping[str, Sequence[Any]]) -> Plan | None:
        system, value = self._tuned(start, most, options)
        if start.options is None:
            self._flags[start.layout] = system.flags
        if value < self._slo.attainment:
            return None
        found = self._bisected(system, fewest, most)
        while found.replicas > fewest:
            system, value = self._tuned(found.system, found.replicas - 1, options)
            if value < self._slo.attainment:
                break
            found = self._bisected(system, fewest, found.replicas - 1)
        if start.options is None:
            self._flags[start.layout] = found.system.flags
        return found

    def _bisected(self, system: System, low: int, high: int) -> Plan:
        """Return the fewest replicas that meet the SLO with these flags; ``high`` does."""
        while low < high:
            middle = (low + high) // 2
            if self._value(system, middle) >= self._slo.attainment:
                high = middle
            else:
                low = middle + 1
        return Plan(system, high, self._value(system, high))

    def _tuned(self, start: System, replicas: int, options: Mapping[str, Sequence[Any]]) -> tuple[System, float]:
        """Return the best system at a number of replicas; the first that meets the SLO ends the search."""
        needed, left = self._slo.attainment, self._most
        best, value = start, self._value(start, replicas)
        groups: list[tuple[str, Sequence[Any]]] = [*options.items(), *self._choices.flag_values.items()]
        telling = len(options) + (self._choices.drafter is not None)  # groups of flags after which hope may be given up
        for _ in range(2):
            before = value
            for at, (name, values) in enumerate(groups):
                for one in values:
                    system = self._changed(best, name, one, options)
                    if value >= needed or not left:
                        return best, value
                    if system == best or not self._choices.accepted(system):
                        continue
                    left -= 1
                    reached = self._value(system, replicas)
                    if reached > value + _BETTER:
                        best, value = system, reached
                if at >= telling and value < _HOPELESS * needed:
                    return best, value
            if value <= before + _BETTER:
                break
        return best, value

    def _changed(self, system: System, name: str, value: Any, options: Mapping[str, Sequence[Any]]) -> System:
        if name in self._choices.flag_values:
            return replace(system, flags=replace(system.flags, **{name: value}))
        group = {key for one in options[name] for key in one}
        shared = {key for other, values in options.items() if other != name for one in values for key in one}
        kept = {
            key: one for key, one in (system.options or {}).items() if key not in group or key in shared - set(value)
        }
        found = kept | dict(value)
        if not found.keys() & {"prefill_control", "batch_control"}:
            found.pop("control_target_ms", None)  # without effect
        return replace(system, options=found)

    def _value(self, system: System, replicas: int) -> float:
        """Return the fraction within the SLO over the training seeds; 0 if it is impossible."""
        options = None if system.options is None else repr(sorted(system.options.items()))
        key = (system.layout, system.flags, options, system.prefill, replicas)
        if key not in self._known:
            self._known[key] = self._measured(system, replicas)
        return self._known[key]

    def _measured(self, system: System, replicas: int) -> float:
        values: list[float] = []
        for seed in range(min(self._seeds, replicas)):
            served = serve(self._choices, system, self._load.part(replicas, seed), self._slo)
            self.tally.trials += 1
            self.tally.requests += served.requests
            values.append(served.attainment)
            if self._progress is not None:
                self._progress(self.tally.trials, f"{replicas} x {system.devices} {system.layout.device}")
            if served.attainment < self._slo.attainment - _CLEAR:
                break
        return sum(values) / len(values)

    def _fewest_possible(self, layout: Layout) -> int:
        """Return the replicas whose devices can do all operations, if they did nothing else and forgot no prefix."""
        costs, work = self._choices.costs(layout, Flags()), self._load.work
        seconds = costs.operations_seconds(work.outputs, int(work.reads), work.tokens, work.pairs) or 0.0
        return max(1, math.ceil(0.9 * self._slo.attainment * seconds / self._load.seconds))
