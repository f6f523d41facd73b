"""Tables of the studies in which replicas come and go, from the files that they leave. No number is written by hand."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from result_tables import NOTHING, table

from vllm_omni_sched.sim.study.spread import interval

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


def spoken(found: Record | None) -> str:
    """Show which model each variant forecast with; counts are of bins, over both modalities and all seeds."""
    if found is None:
        return NOTHING
    rows = []
    for variant, records in _by_variant(found).items():
        said: Counter[str] = Counter()
        for one in records:
            counters = one.get("summary", {}).get("counters", {})
            said.update({key: count for key, count in counters.items() if key.startswith("forecast_")})
        if said:
            models = {key.removeprefix("forecast_model_"): n for key, n in said.items() if "_model_" in key}
            bins = sum(models.values())
            order = sorted(models, key=lambda name: -models[name])
            spoke = ", ".join(f"{name} {models[name] / bins:.0%}" for name in order)
            guarded = said.get("forecast_because_guarded", 0) / bins
            trips = said.get("forecast_guard_trips", 0) / len(records)
            rows.append((variant, f"{trips:.2g}", f"{guarded:.0%}", spoke))
    return table(("variant", "guard tripped", "bins under guard", "model that spoke"), rows) if rows else NOTHING


def failures(found: Record | None) -> str:
    """Return a row for each variant: lost requests, and the time until recovery."""
    header = (
        "variant", "requests", "lost", "failed", "moved", "within SLO", "TTFT P99, s", "LLM deaths",
        "LLM replicas at work", "seconds without any", "worst bin", "bins below SLO",
    )  # fmt: skip

    def row(one: Record, summary: Record) -> Sequence[str]:
        there = summary.get("availability", {}).get("llm", {"serving": 1.0, "seconds_without_any": 0.0})
        bins = [part for part in one["over_time"]["within_slo"] if part is not None]
        below = sum(part < found["scenario"]["slo"]["attainment"] for part in bins)
        return (
            (summary["requests"], "{:,.0f}"),
            (summary["lost"], "{:.0f}"),
            (summary["failed"], "{:,.0f}"),
            (summary["attempts"] - summary["requests"], "{:,.0f}"),
            (summary["within_slo"], "{:.1%}"),
            (summary["ttft_seconds"]["p99"], "{:.3g}"),
            (summary["counters"].get("llm_deaths", 0), "{:.0f}"),
            (there["serving"], "{:.0%}"),
            (there["seconds_without_any"], "{:.0f}"),
            (min(bins), "{:.0%}"),
            (below, "{:.0f}"),
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
    return table(header, rows) + f"\nSimulated: revision {at['revision']}, {several}; `{at['command']}`.\n"


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
