"""Measures over all requests of all rounds together, with bootstrap intervals of their ratios to the baseline's.

A P99 of one round with ten requests would be its maximum, and the median of such maxima says little about the tail.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.stats import quantile

TTFT_SLO, GAP_SLO = 2.0, 0.1  # seconds
RESAMPLES = 1000
Rounds = Sequence[dict[str, Any]]


def is_good(request: dict[str, Any]) -> bool:
    """Return whether a request met its SLO."""
    return bool(request["ttft"] <= TTFT_SLO and max(request["gaps"], default=0.0) <= GAP_SLO)


def gaps_beside(text: list[dict[str, Any]], image: list[dict[str, Any]]) -> list[float]:
    """Return the intervals between tokens of text requests while a request with images waits, in seconds."""
    waits = [(r["at"], r["at"] + r["ttft"]) for r in image]
    found = []
    for request in text:
        end = request["at"] + request["ttft"]
        for gap in request["gaps"]:
            start, end = end, end + gap
            if any(start < until and end > since for since, until in waits):
                found.append(gap)
    return found


def of_kind(answer: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the requests of a round that are of this kind."""
    return [request for request in answer["requests"] if request["kind"] == kind]


def _ttft(answer: dict[str, Any], kind: str) -> list[float]:
    return [1e3 * request["ttft"] for request in of_kind(answer, kind)]


def _beside(answer: dict[str, Any]) -> list[float]:
    return [1e3 * gap for gap in gaps_beside(of_kind(answer, "text"), of_kind(answer, "image"))]


def _session(answer: dict[str, Any]) -> list[float]:
    return [1e3 * seconds for request in answer["requests"] for seconds in request.get("latencies", ())]


def met_slo(answer: dict[str, Any]) -> list[bool]:
    """Return for each request of a round whether it met its SLO, which one that failed did not."""
    return [is_good(request) for request in answer["requests"]] + [False] * len(answer.get("failed", ()))


def _good(answer: dict[str, Any]) -> list[float]:
    return [100.0 * met for met in met_slo(answer)]


def _failed(answer: dict[str, Any]) -> list[float]:
    return [float(len(answer["failed"]))] if answer.get("failed") else []


def _rates(answer: dict[str, Any]) -> list[float]:
    return [sum(request["tokens"] for request in answer["requests"]) / answer["seconds"]]


MEASURES: dict[str, tuple[Callable[[dict[str, Any]], list[float]], Callable[[Sequence[float]], float]]] = {
    "image TTFT P50": (lambda answer: _ttft(answer, "image"), lambda values: quantile(values, 0.5)),
    "image TTFT P99": (lambda answer: _ttft(answer, "image"), lambda values: quantile(values, 0.99)),
    "ITL beside images P99": (_beside, lambda values: quantile(values, 0.99)),
    "text TTFT P99": (lambda answer: _ttft(answer, "text"), lambda values: quantile(values, 0.99)),
    "session P50": (_session, lambda values: quantile(values, 0.5)),
    "session P99": (_session, lambda values: quantile(values, 0.99)),
    "tokens / s": (_rates, statistics.fmean),
    "within SLO %": (_good, statistics.fmean),
    "failed requests": (_failed, sum),
}
"""Of each measure, the values of a round, and what is made of the values of all rounds."""


def pooled(rounds: Rounds, base: Rounds, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the measures over all ``rounds``, and their ratios to those of the baseline's rounds.

    The interval of a ratio is a 95 % percentile bootstrap over pairs of rounds (Efron, 1979): both variants were sent
    the same requests in each pair. A measure without values is left out, and so is the ratio to a baseline of 0.
    """
    drawn = np.random.default_rng(seed).integers(0, len(rounds), (RESAMPLES, len(rounds))).tolist()
    for name, (values, summary) in MEASURES.items():
        own, other = [values(one) for one in rounds], [values(one) for one in base]
        if not any(own):
            continue
        record = {
            "measure": f"{name}, all rounds together",
            "samples": sum(map(len, own)),
            "median": _over(own, summary),
        }
        if base is not rounds and (ratio := _ratio(own, other, range(len(rounds)), summary)) is not None:
            found = [one for at in drawn if (one := _ratio(own, other, at, summary)) is not None]
            record |= {"ratio": ratio, "ratio_interval": [quantile(found, 0.025), quantile(found, 0.975)]}
        yield record


def _over(of_rounds: Sequence[list[float]], summary: Callable[[Sequence[float]], float]) -> float:
    return summary([value for values in of_rounds for value in values])


def _ratio(
    own: Sequence[list[float]],
    other: Sequence[list[float]],
    at: Sequence[int],
    summary: Callable[[Sequence[float]], float],
) -> float | None:
    mine, base = [own[i] for i in at], [other[i] for i in at]
    if not any(mine) or not any(base) or not (below := _over(base, summary)):
        return None
    return _over(mine, summary) / below
