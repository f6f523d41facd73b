"""Measures of the rounds, and whether they are within their bars. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.harness.stats import Summary, quantile
from dev.omni_cpu.compare import first_difference


@dataclass(frozen=True)
class Bar:
    """The most that a measure may be: the median of the ratios of ours to stock, or the worst of ours."""

    most: float
    of: Literal["ratio", "worst"] = "ratio"


def entry(
    task: str,
    measure: str,
    ours: Sequence[float],
    stock: Sequence[float] | None = None,
    *,
    unit: str = "seconds",
    bar: Bar | None = None,
) -> dict[str, Any]:
    """Summarise a measure over the rounds; its ratio is the median of those round by round, with quartiles."""
    found: dict[str, Any] = {"task": task, "measure": measure, "unit": unit, "ours": Summary.of(ours).as_dict()}
    if stock is not None:
        found["stock"] = Summary.of(stock).as_dict()
        if all(stock):
            ratios = [one / other for one, other in zip(ours, stock, strict=True)]
            found["of_stock"] = round(statistics.median(ratios), 4)
            found["of_stock_low"], found["of_stock_high"] = (round(quantile(ratios, q), 4) for q in (0.25, 0.75))
    if bar is not None:
        value = found["of_stock"] if bar.of == "ratio" else max(ours)
        found |= {"bar": bar.most, "judged_by": bar.of, "met": value <= bar.most}
    return found


def latencies(wave: dict[str, Any], which: Sequence[bool] | None = None) -> list[float]:
    """Seconds from when each was due to its last output, of those that were answered."""
    chosen = which or [True] * len(wave["told"])
    return [
        one["end"] - one["at"] for one, wanted in zip(wave["told"], chosen, strict=True) if wanted and not one["error"]
    ]


def answered(wave: dict[str, Any]) -> int:
    return sum(one["error"] is None for one in wave["told"])


def different(wave: dict[str, Any], other: dict[str, Any]) -> int:
    """Answers that are not those of the other wave; one that is missing in either does not count."""
    pairs = [(a["answer"], b["answer"]) for a, b in zip(wave["told"], other["told"], strict=True)]
    return sum(bool(a and b and first_difference({"": a}, {"": b})) for a, b in pairs)


def runs(wave: dict[str, Any], stage: int) -> int:
    """Count how often the engines of a stage were given something to do."""
    return sum(count for where, count in wave["runs"].items() if where.startswith(f"{stage}/"))
