"""Search for plans in which some replicas compute prompts, and others decode."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.hardware import DEVICES
from vllm_omni_sched.sim.plan.load import Load
from vllm_omni_sched.sim.plan.systems import FLAG_VALUES, Choices, Flags, Layout, Prefill, System, shipped
from vllm_omni_sched.sim.scenario.scenario import Slo

Value = Callable[[System, int], float]
"""Function that returns the fraction within the SLO in training of so many groups of a system."""
Found = tuple[System, int]
"""A system, and the number of its groups."""

_SLACK = 0.8  # of the replicas that are needed by `_needed`: fewer are not tried
_BETTER = 1e-4  # less is no gain
_LEAST = 1e-9  # replicas: of a load that only has prompts


class PoolSearch:
    """Searches the numbers of prefill and decode replicas, and their flags.

    1. Replicas of both kinds are on the same kind of device, and split the model in the same way, without a pipeline.
    2. The replicas of each kind that a layout needs are bounded from below: prefill replicas by the operations of the
       prompts, decode replicas by the largest batch whose steps meet the target of a gap and whose KV cache fits.
       Layouts for which these cost as much as the best plan are left out.
    3. At the largest number of replicas that is cheaper, the ratio is found by steps of one replica, from that of the
       bounds, as long as more requests are within the SLO. Then the flags of both kinds are tuned there.
    4. If that meets the SLO, a replica is taken away, of the one kind or the other, as long as it still does.

    Args:
        value: measures a plan.
        flags: those that were best for a layout in one pool, to begin with.
        trials: most values that are measured for a layout.
    """

    def __init__(
        self,
        choices: Choices,
        load: Load,
        slo: Slo,
        value: Value,
        flags: Mapping[Layout, Flags],
        trials: int,
    ) -> None:
        self._choices, self._load, self._slo, self._trials = choices, load, slo, trials
        self._value, self._flags = value, flags
        self._left = 0

    def search(self, below: float | None) -> Found | None:
        """Return the cheapest system that meets the SLO for less than this price, and the number of groups."""
        found: Found | None = None
        needed = {one: self._needed(one) for one in self._choices.layouts if one.parallel.pipeline == 1}
        for layout in sorted(needed, key=lambda one: (sum(needed[one]) * one.price_each, one.device)):
            most = self._choices.most_devices // layout.parallel.devices
            if below is not None:
                most = min(most, math.ceil(below / layout.price_each - 1e-9) - 1)
            least = [max(1, math.ceil(_SLACK * number)) for number in needed[layout]]
            if most < sum(least):
                continue
            one = self._fewest(layout, most, needed[layout], (least[0], least[1]))
            if one is not None:
                found, below = one, one[0].price * one[1]
        return found

    def _needed(self, layout: Layout) -> tuple[float, float]:
        """Return the prefill and decode replicas that the load needs at least."""
        choices, work, seconds = self._choices, self._load.work, self._load.seconds
        costs = choices.costs(layout, Flags())
        prompts = (costs.operations_seconds(0, 0, work.tokens, work.pairs) or 0.0) / seconds
        fastest = 0.0
        for drafts in choices.flag_values.get("num_speculative_tokens", (0,)):
            flags = Flags(num_speculative_tokens=drafts)
            try:
                costs = choices.costs(layout, flags)
            except ConfigError:
                continue
            limits = choices.limits(flags, costs)
            made = 1.0 if limits.speculation is None else limits.speculation.tokens_of_step
            allowed = self._slo.itl_seconds * (made if self._slo.itl_of == "mean" else 1.0)
            batch = self._largest_batch(costs.step_seconds, allowed, int(costs.kv_tokens / self._load.tokens))
            step = costs.step_seconds(batch, int(batch * self._load.tokens), 0, 0.0)
            fastest = max(fastest, made * batch / step)
        decodes = work.outputs / seconds / fastest
        return max(self._slo.attainment * prompts, _LEAST), max(self._slo.attainment * decodes, _LEAST)

    def _largest_batch(self, step: Callable[[int, int, int, float], float], allowed: float, room: int) -> int:
        low, high = 1, max(1, min(room, max(FLAG_VALUES["max_num_seqs"])))
        while low < high:
            middle = (low + high + 1) // 2
            if step(middle, int(middle * self._load.tokens), 0, 0.0) <= allowed:
                low = middle
            else:
                high = middle - 1
        return low

    def _fewest(self, layout: Layout, most: int, needed: tuple[float, float], least: tuple[int, int]) -> Found | None:
        self._left = self._trials
        of_prompts = shipped(DEVICES.get(layout.device))
        flags = replace(self._flags.get(layout, of_prompts), max_num_batched_tokens=of_prompts.max_num_batched_tokens)
        system = System(layout, flags, None, Prefill(layout, replace(of_prompts, num_speculative_tokens=0)))
        if not self._choices.accepted(system):
            system = replace(system, flags=of_prompts)
        prefills = min(max(round(most * needed[0] / sum(needed)), least[0]), most - least[1])
        prefills, value = self._best_ratio(system, prefills, most, least)
        if value < self._slo.attainment:
            system, value = self._tuned(system, prefills, most - prefills, value)
        if value < self._slo.attainment:
            return None
        decodes = most - prefills
        while (fewer := self._one_less(system, prefills, decodes, needed)) is not None:
            prefills, decodes = fewer
        return system.apart(prefills, decodes)

    def _measure(self, system: System, prefills: int, decodes: int) -> float:
        """Return the fraction within the SLO of so many replicas in all; 0 if no trial is left."""
        if not self._left:
            return 0.0
        self._left -= 1
        return self._value(*system.apart(prefills, decodes))

    def _best_ratio(self, system: System, prefills: int, most: int, least: tuple[int, int]) -> tuple[int, float]:
        value = self._measure(system, prefills, most - prefills)
        for way in (1, -1):
            moved = False
            while value < self._slo.attainment and least[0] <= prefills + way <= most - least[1]:
                reached = self._measure(system, prefills + way, most - prefills - way)
                if reached <= value + _BETTER:
                    break
                prefills, value, moved = prefills + way, reached, True
            if moved:
                break
        return prefills, value

    def _tuned(self, system: System, prefills: int, decodes: int, value: float) -> tuple[System, float]:
        for name, values in self._choices.flag_values.items():
            for of_prompts in (True, False):
                if of_prompts and name in ("num_speculative_tokens", "max_num_seqs"):
                    continue  # they only matter where requests decode
                for one in values:
                    changed = _with_flag(system, name, one, of_prompts)
                    if value >= self._slo.attainment or not self._left:
                        return system, value
                    if changed == system or not self._choices.accepted(changed):
                        continue
                    reached = self._measure(changed, prefills, decodes)
                    if reached > value + _BETTER:
                        system, value = changed, reached
        return system, value

    def _one_less(
        self, system: System, prefills: int, decodes: int, needed: tuple[float, float]
    ) -> tuple[int, int] | None:
        """Return the numbers with one replica less that still meet the SLO; the kind with more to spare goes first."""
        ways = [(prefills - 1, decodes), (prefills, decodes - 1)]
        if decodes / needed[1] > prefills / needed[0]:
            ways.reverse()
        for one in ways:
            if min(one) >= 1 and self._measure(system, *one) >= self._slo.attainment:
                return one
        return None


def _with_flag(system: System, name: str, value: Any, of_prompts: bool) -> System:
    if not of_prompts:
        return replace(system, flags=replace(system.flags, **{name: value}))
    assert system.prefill is not None
    return replace(system, prefill=replace(system.prefill, flags=replace(system.prefill.flags, **{name: value})))
