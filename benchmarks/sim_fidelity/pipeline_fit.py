"""Fit one calibration for each stage to designed loads on a real pipeline. Pure.

1. A step of the first stage takes what passes between its outputs, by how many decode: those loads have one engine and
   the front end at work, on two cores.
2. A token of a prompt takes what a first output is later with more of them; without any, a prompt would take a step of
   one request.
3. A step of the second stage takes what each step adds where one request is alone. With more requests it takes longer
   as its processor time does: its replicas run at the same time then, and what passes is more than each needs.
4. The front end's processor time is split, by least squares, into what it takes by itself (it polls), for each
   request, for each step's outputs, and for each output; half of a request's is for each stage.
5. Stages that are at work at the same time slow each other down: of more engines than cores each has its part, and a
   step takes what else it was longer beside one other engine, or two; so many seconds, however many requests it has.
   What a first output is later beside them than a step is longer, its request waits in the front end.
6. What of the first output's time is left goes to ``answer_seconds``, and what is left of the second stage's to the
   link between the stages.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni_sched.sim.costs.fit import FrontPoint, Observations, StepPoint, fit, relative_fit

FRONT = "front end"
CORES = 2  # of the machine
STEADY_AFTER = 4  # outputs: by then all requests of a load have begun

Waves = Sequence[dict[str, Any]]
"""Each has ``name``, ``told``, ``seconds`` and ``cpu_seconds`` as `pipeline_serve.py` tells them."""

Loads = dict[str, list[dict[str, Any]]]
"""Waves by name."""


@dataclass(frozen=True)
class Fitted:
    """``stages``: costs of each as `write_calibration` takes them; ``link_seconds``: from the first to the second;
    ``polling``: part of a core that the front end takes by itself.
    """

    stages: tuple[dict[str, Any], dict[str, Any]]
    link_seconds: float
    polling: float


def fitted(waves: Waves) -> Fitted:
    """Fit the costs of both stages to loads as `pipeline_loads.designed` has them, each at least once.

    Raises:
        KeyError: one of them is missing.
    """
    loads: Loads = defaultdict(list)
    for wave in waves:
        loads[wave["name"]].append(wave)
    front = front_costs(waves)
    think = {n: _mean_gap(loads[f"think {n}"]) for n in (1, 2, 4, 8)}
    firsts = {n: _median(loads[f"prompt {n}"], first_seconds) for n in (20, 150, 600)}
    say = talker_step_seconds(loads)
    message = front["per_step"] + front["per_output"]
    short = 20 * (firsts[600] - firsts[20]) / (600 - 20)  # what the tokens of the shortest prompt add
    answer = max(firsts[20] - front["per_request"] - think[1] - short - message, 0.0)
    after = _median(loads["prompt 20"], after_seconds)
    link = max(after - front["per_request"] - say[1] - message - answer, 0.0)

    first, second = Observations(answers=[answer]), Observations(answers=[answer])
    first.steps = [StepPoint(n, 0, 0, 0.0, seconds) for n, seconds in think.items()]
    first.steps += [StepPoint(0, 0, n, 0.0, think[1] + firsts[n] - firsts[20] + short) for n in firsts]
    first.steadiness = steadiness(loads)
    second.steps = [StepPoint(n, 0, 0, 0.0, seconds) for n, seconds in say.items()]
    second.steps.append(StepPoint(0, 0, 1, 0.0, say[1]))
    second.steadiness = first.steadiness
    found = []
    longer = [_mean_gap(loads[f"beside {busy}"]) for busy in (1, 2)]
    slowdowns = beside(think[1], longer), beside(say[1], talker_step_seconds_beside(loads)[1:])
    waits = [
        max(_median(loads[f"beside {busy}"], last_first_seconds) - firsts[20] - (step - think[1]), 0.0)
        for busy, step in zip((1, 2), longer, strict=True)
    ]
    for seen, slower in zip((first, second), slowdowns, strict=True):
        seen.fronts = [FrontPoint(0, "", 0, front["per_request"])]
        costs = fit(seen)
        costs["frontend"] |= {"per_step": front["per_step"], "per_output": front["per_output"], "beside": waits}
        costs["step"]["beside"] = slower
        found.append(costs)
    return Fitted((found[0], found[1]), link, front["polling"])


def gaps(wave: dict[str, Any]) -> list[float]:
    """Return the times between outputs of the first stage once all requests have begun; simultaneous outputs count."""
    return [
        after - before for one in wave["told"] for before, after in itertools.pairwise(one["outputs"][STEADY_AFTER:])
    ]


def first_seconds(wave: dict[str, Any]) -> list[float]:
    return [one["outputs"][0] for one in wave["told"]]


def last_first_seconds(wave: dict[str, Any]) -> list[float]:
    """Return the time to the first output of the request that came last."""
    return first_seconds({"told": wave["told"][-1:]})


def after_seconds(wave: dict[str, Any]) -> list[float]:
    """Return the times from the first stage's last output to the end of the request."""
    return [one["end"] - one["outputs"][-1] for one in wave["told"]]


def talker_step_seconds(loads: Loads) -> dict[int, float]:
    """Return the seconds of a step of the second stage by the number of requests in a replica (rule 3)."""
    alone, cpu = talker_step_seconds_beside(loads)[0], _cpu_step(loads, 2)
    return {n // 2: alone * _cpu_step(loads, n) / cpu for n in (2, 4, 8, 16)}


def _cpu_step(loads: Loads, n: int) -> float:
    """Return the processor seconds of a step of a replica that has half of so many requests."""

    def busy(wave: dict[str, Any]) -> float:
        return sum(seconds for process, seconds in wave["cpu_seconds"].items() if process.startswith("1/")) / 2

    return (_mean(loads[f"say {n}"], busy) - _mean(loads[f"say short {n}"], busy)) / _more(loads)


def _more(loads: Loads) -> int:
    """Return the steps of a long load beyond those of a short one."""
    return int(loads["say 1"][0]["told"][0]["says"] - loads["say short 1"][0]["told"][0]["says"])


def beside(alone: float, steps: Sequence[float]) -> list[float]:
    """Return the extra seconds of a step beside one other engine, two, …, on top of its part of the cores.

    ``steps``: what it takes there.
    """
    return [max(step - max((others + 1) / CORES, 1.0) * alone, 0.0) for others, step in enumerate(steps, 1)]


def talker_step_seconds_beside(loads: Loads) -> list[float]:
    """Return the seconds of a step of the second stage with one request: alone, and beside one and two other engines.

    Each of its requests makes its tokens beside so many for so long, and beside so many others for so long: of the
    times we know all, of the tokens only their sum. Besides its part of the cores a step loses the same beside one and
    beside two: what makes the sum right.
    """
    handed = _median(loads["prompt 20"], after_seconds)  # to the second stage, with one token of its answer
    by_load = {
        name: [one for wave in loads[name] for one in _by_others(wave["told"], handed)]
        for name in ("say 1", "say 2", "beside 1", "beside 2")
    }
    alone = sum(sum(seconds) for seconds, _ in by_load["say 1"]) / sum(tokens for _, tokens in by_load["say 1"])
    every = [one for own in by_load.values() for one in own]
    times = [sum(seconds[others] for seconds, _ in every) for others in range(3)]
    tokens = sum(made for _, made in every)
    low, high = 0.0, 10 * alone
    for _ in range(50):
        lost = (low + high) / 2
        makes = sum(
            seconds / (max((others + 1) / CORES, 1.0) * alone + (lost if others else 0.0))
            for others, seconds in enumerate(times)
        )
        low, high = (lost, high) if makes > tokens else (low, lost)
    return [alone, alone + low, 3 / CORES * alone + low]


def _by_others(told: Sequence[dict[str, Any]], handed: float) -> list[tuple[tuple[float, float, float], int]]:
    """Return the seconds alone, beside one and beside two others, and the tokens of each answer of the second stage."""
    spans = []
    for one in told:
        if one["thinks"] > 1:
            spans.append((one["at"] + one["outputs"][0], one["at"] + one["outputs"][-1], 0))
        if one["says"] > 1:
            spans.append((one["at"] + one["outputs"][-1] + handed, one["at"] + one["end"], one["says"] - 1))
    found = []
    for begun, ended, tokens in spans:
        if tokens:
            times = sorted({begun, ended, *(at for span in spans for at in span[:2] if begun < at < ended)})
            seconds = [0.0, 0.0, 0.0]
            for at, until in itertools.pairwise(times):
                others = sum(first <= at and until <= last for first, last, _ in spans) - 1
                seconds[min(others, 2)] += until - at
            found.append(((seconds[0], seconds[1], seconds[2]), tokens))
    return found


def steadiness(loads: Loads) -> list[float]:
    """Return the times of steps, alone and beside other engines, each as a fraction of the mean of its load."""
    found = []
    for name in (*(f"think {n}" for n in (1, 2, 4, 8)), "beside 1", "beside 2"):
        mean = _mean_gap(loads[name])
        found += [gap / mean for wave in loads[name] for gap in _of_engine(wave)]
    return found


def _of_engine(wave: dict[str, Any]) -> list[float]:
    """Return the gaps of the request that came last: requests that decode together have the same ones."""
    return gaps({"told": wave["told"][-1:]})


def front_costs(waves: Waves) -> dict[str, float]:
    """Fit the front end's costs of one stage (rule 4), in seconds, and ``polling``."""
    rows, values = [], []
    for wave in waves:
        told = wave["told"]
        thinks, says = [one["thinks"] for one in told], [one["says"] for one in told]
        together = max(one["at"] for one in told) < wave["seconds"] / 4
        count: Callable[[Sequence[int]], int] = max if together else sum
        steps = count(thinks) + count(says) * (min(len(told), 2) if together else 1)
        rows.append((wave["seconds"], float(len(told)), float(steps), float(sum(thinks) + sum(says))))
        values.append(wave["cpu_seconds"][FRONT])
    polling, request, step, output = relative_fit(np.asarray(rows), values)
    return {"polling": polling, "per_request": request / 2, "per_step": step, "per_output": output}


def _mean_gap(waves: Waves) -> float:
    return statistics.fmean(gap for wave in waves for gap in gaps(wave))


def _mean(waves: Waves, of: Callable[[dict[str, Any]], float]) -> float:
    return statistics.fmean(of(wave) for wave in _measured(waves))


def _median(waves: Waves, of: Callable[[dict[str, Any]], Iterable[float]]) -> float:
    """Return the median over all requests: a load has few, and a delay of the machine is not a cost of a request."""
    return statistics.median(seconds for wave in _measured(waves) for seconds in of(wave))


def _measured(waves: Waves) -> Waves:
    if not waves:
        raise KeyError("a designed load was not measured")
    return waves
