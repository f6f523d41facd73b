"""Tables of the studies in which replicas come and go, from the files that they leave. No number is written by hand."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from result_tables import NOTHING, short, table

from vllm_omni_sched.sim.study.report import interval

Record = Mapping[str, Any]
Cell = tuple[float | None, str]
"""A number, and how it is written."""


def day_night(found: Record | None) -> str:
    """Return a row for each variant: latencies, goodput and cost."""
    header = (
        "variant",
        "within SLO",
        "TTFT P99, s",
        "goodput, requests/s",
        "device hours per 1,000",
        "replicas started",
    )
    return _table(
        found,
        header,
        lambda one, summary: (
            (summary["within_slo"], "{:.1%}"),
            (summary["ttft_seconds"]["p99"], "{:.3g}"),
            (summary["goodput_per_second"], "{:.2f}"),
            (summary["gpu_hours_per_1000_requests"], "{:.3g}"),
            (summary["counters"].get("llm_started", 0), "{:.0f}"),
        ),
    )


def failures(found: Record | None) -> str:
    """Return a row for each variant: lost requests, and the time until recovery."""
    header = (
        "variant", "lost", "failed", "moved", "within SLO", "TTFT P99, s", "seconds without an LLM", "worst bin",
    )  # fmt: skip

    def row(one: Record, summary: Record) -> Sequence[str]:
        there = summary.get("availability", {}).get("llm", {"seconds_without_any": 0.0})
        bins = [part for part in one["over_time"]["within_slo"] if part is not None]
        return (
            (summary["lost"], "{:.0f}"),
            (summary["failed"], "{:,.0f}"),
            (summary["attempts"] - summary["requests"], "{:,.0f}"),
            (summary["within_slo"], "{:.1%}"),
            (summary["ttft_seconds"]["p99"], "{:.3g}"),
            (there["seconds_without_any"], "{:.0f}"),
            (min(bins), "{:.0%}"),
        )

    return _table(found, header, row)


def _table(found: Record | None, header: Sequence[str], row: Callable[[Record, Record], Sequence[Cell]]) -> str:
    """Return a row for each variant: means over its seeds, with half of their 95 % intervals."""
    if found is None:
        return NOTHING
    rows = []
    for variant, records in _by_variant(found).items():
        cells = [row(one, one["summary"]) for one in records if "summary" in one]
        rows.append((variant, *(_mean(column) for column in zip(*cells, strict=True))))
    at, seeds = found["provenance"], sorted({one.get("seed", 0) for one in found["results"]})
    several = f"seeds {seeds[0]} to {seeds[-1]}, mean ± half of the 95 % interval" if len(seeds) > 1 else "one seed"
    return table(header, rows) + f"\nSimulated: revision {at['revision']}, {several}; `{short(at['command'])}`.\n"


def _by_variant(found: Record) -> dict[str, list[Record]]:
    by: dict[str, list[Record]] = {}
    for one in found["results"]:
        by.setdefault(one["variant"], []).append(one)
    return by


def _mean(cells: Sequence[Cell]) -> str:
    values = [value for value, _ in cells if value is not None]
    if not values:
        return ""
    mean, half = interval([float(value) for value in values])
    form = cells[0][1]
    return form.format(mean) + (f" ± {form.format(half)}" if half else "")
