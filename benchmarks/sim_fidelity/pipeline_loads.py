"""Make the pipeline's loads from a seed: some to calibrate with, others to evaluate on. Pure.

A request is ``{"at": seconds, "prompt_tokens": …, "thinks": …, "says": …}``.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

Wave = list[dict[str, Any]]

SAYS_EACH = 2
"""Tokens that the second stage makes for each one of the first, as a talker's codes follow its text."""
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE = 60.0, 0.9, (20, 600)
THINKS_MEDIAN, THINKS_SIGMA, THINKS_RANGE = 24.0, 0.6, (4, 100)
BURSTY_CV = 2.0
ARRIVALS = {"poisson": 1.0, "bursty": BURSTY_CV}  # coefficients of variation of the gaps

_SHORT, _STEPS, _LONG = 24, 64, 200


def alike(number: int, prompt_tokens: int, thinks: int, says: int, gap: float = 0.0) -> Wave:
    """Return requests of one size, ``gap`` seconds apart."""
    return [
        {"at": gap * index, "prompt_tokens": prompt_tokens, "thinks": thinks, "says": says} for index in range(number)
    ]


def designed() -> dict[str, Wave]:
    """Return loads that each show one cost, by name; their requests are as short as possible in the other stage."""
    found = {f"think {n}": alike(n, _SHORT, _STEPS, 1) for n in (1, 2, 4, 8)}
    found |= {f"say {n}": alike(n, _SHORT, 1, _STEPS) for n in (1, 2, 4, 8, 16)}
    found |= {f"say short {n}": alike(n, _SHORT, 1, 4) for n in (1, 2, 4, 8, 16)}
    found |= {f"prompt {n}": alike(4, n, 1, 1, 0.12) for n in (20, 150, 600)}
    found["both"] = alike(8, _SHORT, _STEPS // 2, _STEPS)
    found |= {f"beside {n}": beside(n) for n in (1, 2)}
    found["idle"] = [{"at": 1.0, "prompt_tokens": _SHORT, "thinks": 1, "says": 1}]
    return found


def beside(busy: int) -> Wave:
    """Return one request for the first stage while so many replicas of the second one are busy."""
    return [*alike(busy, _SHORT, 1, _LONG), {"at": 0.3, "prompt_tokens": _SHORT, "thinks": _STEPS, "says": 1}]


def saturating(number: int, seed: int) -> Wave:
    """Return requests like those of the evaluation that all arrive at once, to find the pipeline's capacity."""
    rng = Random(f"{seed} saturating")
    return [_drawn(rng, 0.0) for _ in range(number)]


def arriving(kind: str, rate: float, seconds: float, seed: int) -> Wave:
    """Return requests with Gamma gaps, ``rate`` per second on average; arrivals do not wait for earlier requests."""
    rng = Random(f"{seed} {kind} {rate}")
    shape = 1 / ARRIVALS[kind] ** 2
    found, at = [], rng.gammavariate(shape, 1 / (shape * rate))
    while at < seconds:
        found.append(_drawn(rng, at))
        at += rng.gammavariate(shape, 1 / (shape * rate))
    return found


def _drawn(rng: Random, at: float) -> dict[str, Any]:
    thinks = _lognormal(rng, THINKS_MEDIAN, THINKS_SIGMA, THINKS_RANGE)
    prompt = _lognormal(rng, PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE)
    return {"at": at, "prompt_tokens": prompt, "thinks": thinks, "says": SAYS_EACH * thinks}


def _lognormal(rng: Random, median: float, sigma: float, within: tuple[int, int]) -> int:
    return min(max(round(rng.lognormvariate(math.log(median), sigma)), within[0]), within[1])
