"""From designed loads on a real pipeline to one calibration for each stage. Pure.

1. A step of the first stage takes what passes between its outputs, by how many decode: those loads have one engine and
   the front end at work, on two cores.
2. A prompt of so many tokens takes what its first output is later than that of a short one; a short one takes a step
   of one request.
3. A step of the second stage takes the processor time that each step adds, times what passes per processor second
   where one request is alone: its replicas run at the same time, and what passes is more than each needs.
4. The front end's processor time is split, by least squares, into what it takes by itself (it polls), for each
   request, for each step's outputs, and for each output; half of a request's is for each stage.
5. What of the first output's time is left goes to ``answer_seconds``, and what is left of the second stage's to the
   link between the stages.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni_sched.sim.costs.fit import FrontPoint, Observations, StepPoint, fit, relative_fit

FRONT = "front end"
STEADY_AFTER = 4  # outputs: by then all requests of a load have begun

Waves = Sequence[dict[str, Any]]
"""Each has ``name``, ``told``, ``seconds`` and ``cpu_seconds`` as `pipeline_serve.py` tells them."""


@dataclass(frozen=True)
class Fitted:
    """``stages``: costs of each as `calibration_file.write` takes them; ``link_seconds``: from the first to the second;
    ``polling``: part of a core that the front end takes by itself. ``together``: cores' worth of work that one engine
    gets done, two at once, and three.
    """

    stages: tuple[dict[str, Any], dict[str, Any]]
    link_seconds: float
    polling: float
    together: tuple[float, ...]


def fitted(waves: Waves) -> Fitted:
    """Of loads as `pipeline_loads.designed` has them, each at least once.

    Raises:
        KeyError: one of them is missing.
    """
    loads: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for wave in waves:
        loads[wave["name"]].append(wave)
    front = front_costs(waves)
    think = {n: statistics.fmean(g for w in loads[f"think {n}"] for g in gaps(w)) for n in (1, 2, 4, 8)}
    firsts = {n: _mean(loads[f"prompt {n}"], first_seconds) for n in (20, 150, 600)}
    say = said(loads)
    message = front["per_step"] + front["per_output"]
    answer = max(firsts[20] - front["per_request"] - think[1] - message, 0.0)
    after = _mean(loads["prompt 20"], after_seconds)
    link = max(after - front["per_request"] - say[1] - message - answer, 0.0)

    first, second = Observations(answers=[answer]), Observations(answers=[answer])
    first.steps = [StepPoint(n, 0, 0, 0.0, seconds) for n, seconds in think.items()]
    first.steps += [StepPoint(0, 0, n, 0.0, think[1] + firsts[n] - firsts[20]) for n in firsts]
    first.steadiness = steadiness(loads)
    second.steps = [StepPoint(n, 0, 0, 0.0, seconds) for n, seconds in say.items()]
    second.steps.append(StepPoint(0, 0, 1, 0.0, say[1]))
    second.steadiness = first.steadiness
    found = []
    for seen in (first, second):
        seen.fronts = [FrontPoint(0, "", 0, front["per_request"])]
        costs = fit(seen)
        costs["frontend"] |= {"per_step": front["per_step"], "per_output": front["per_output"]}
        found.append(costs)
    return Fitted((found[0], found[1]), link, front["polling"], together(loads))


def gaps(wave: dict[str, Any]) -> list[float]:
    """Between outputs of the first stage, once all requests have begun; outputs that came together count as such."""
    return [
        after - before
        for one in wave["told"]
        for before, after in itertools.pairwise(one["outputs"][STEADY_AFTER:])
    ]


def first_seconds(wave: dict[str, Any]) -> float:
    return statistics.fmean(one["outputs"][0] for one in wave["told"])


def after_seconds(wave: dict[str, Any]) -> float:
    """From the first stage's last output to the end."""
    return statistics.fmean(one["end"] - one["outputs"][-1] for one in wave["told"])


def said(loads: dict[str, list[dict[str, Any]]]) -> dict[int, float]:
    """Seconds of a step of the second stage by how many requests a replica has (rule 3)."""
    short = loads["say short 1"][0]["told"][0]["says"]
    steps = loads["say 1"][0]["told"][0]["says"] - short

    def more(n: int, of: Callable[[dict[str, Any]], float]) -> float:
        return (_mean(loads[f"say {n}"], of) - _mean(loads[f"say short {n}"], of)) / steps

    def busy(wave: dict[str, Any]) -> float:
        replicas = min(len(wave["told"]), 2)
        return sum(seconds for who, seconds in wave["cpu_seconds"].items() if who.startswith("1/")) / replicas

    passes = max(more(1, after_seconds) / more(1, busy), 1.0)
    return {max(n // 2, 1): passes * more(n, busy) for n in (2, 4, 8, 16)}


def together(loads: dict[str, list[dict[str, Any]]]) -> tuple[float, ...]:
    """By how many engines are at work: how many times one engine's work they do."""
    alone = statistics.fmean(g for w in loads["think 1"] for g in gaps(w))
    found = [1.0]
    for busy in (1, 2):
        beside = statistics.fmean(g for w in loads[f"beside {busy}"] for g in gaps(w))
        found.append(min((busy + 1) * alone / beside, busy + 1.0))
    return tuple(found)


def steadiness(loads: dict[str, list[dict[str, Any]]]) -> list[float]:
    """Of the steps of a load, each as a part of their mean over all rounds."""
    found = []
    for n in (1, 2, 4, 8):
        every = [gap for wave in loads[f"think {n}"] for gap in gaps(wave)]
        mean = statistics.fmean(every)
        found += [gap / mean for gap in every]
    return found


def front_costs(waves: Waves) -> dict[str, float]:
    """Rule 4: of one stage, in seconds; and ``polling``."""
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


def _mean(waves: Waves, of: Callable[[dict[str, Any]], float]) -> float:
    if not waves:
        raise KeyError("a designed load was not measured")
    return statistics.fmean(of(wave) for wave in waves)
