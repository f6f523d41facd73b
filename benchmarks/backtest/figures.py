"""The figures of a measured replay, defined as those of the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.backtest import BARS, SLO, WARM_UP_SECONDS
from benchmarks.harness.stats import quantile

FIGURES = (
    *(f"{name} {part}" for name in ("TTFT", "ITL", "end to end") for part in BARS),
    "tokens / s",
    "within SLO",
)


def gaps_of(answer: dict[str, Any]) -> list[float]:
    """Return the times between the outputs of a request."""
    return [after - before for before, after in itertools.pairwise(answer["outputs"])]


def lag(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how late the client sent the requests, in seconds."""
    late = [one["sent"] - one["due"] for one in answers]
    return {"median": round(quantile(late, 0.5), 6), "largest": round(max(late), 6)}


def measured_figures(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of the requests behind the warm-up; times in seconds.

    They count from when the client has sent a request, as in `vllm bench serve`. How late it sends is in the result.
    """
    own = [one for one in answers if one["due"] >= WARM_UP_SECONDS]
    ttft = [one["outputs"][0] - one["sent"] for one in own]
    whole = [one["outputs"][-1] - one["sent"] for one in own]
    gaps = [gaps_of(one) for one in own]
    met = [
        first <= SLO["ttft_seconds"] and max(between, default=0.0) <= SLO["itl_seconds"]
        for first, between in zip(ttft, gaps, strict=True)
    ]
    found = {}
    for name, values in (("TTFT", ttft), ("ITL", [*itertools.chain(*gaps)]), ("end to end", whole)):
        found[f"{name} P50"], found[f"{name} P99"] = quantile(values, 0.5), quantile(values, 0.99)
    tokens = sum(one["tokens"] for one in own)
    seconds = max(one["outputs"][-1] for one in own) - min(one["due"] for one in own)
    return found | {"tokens / s": tokens / seconds, "within SLO": sum(met) / len(met)}
