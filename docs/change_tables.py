"""Tables of the studies in which replicas come and go, from the files that they leave. No number is written by hand."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from result_tables import NOTHING, table

Record = Mapping[str, Any]


def load(path: Path) -> Record | None:
    """The file of one study; None where it has not been run."""
    return json.loads(path.read_text()) if path.exists() else None


def day_night(found: Record | None) -> str:
    """A row for each variant: what the clients saw, and what it cost."""
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
            f"{summary['within_slo']:.1%}",
            _number(summary["ttft_seconds"]["p99"]),
            f"{summary['goodput_per_second']:.2f}",
            _number(summary["gpu_hours_per_1000_requests"]),
            f"{summary['counters'].get('llm_started', 0)}",
        ),
    )


def spoken(found: Record | None) -> str:
    """Which model spoke, for the variants that forecast; counts are of bins, over both modalities."""
    if found is None:
        return NOTHING
    rows = []
    for one in found["results"]:
        counters = one.get("summary", {}).get("counters", {})
        said = {key: count for key, count in counters.items() if key.startswith("forecast_")}
        if said:
            models = {key.removeprefix("forecast_model_"): n for key, n in said.items() if "_model_" in key}
            bins = sum(models.values())
            order = sorted(models, key=lambda name: -models[name])
            spoke = ", ".join(f"{name} {models[name] / bins:.0%}" for name in order)
            guarded = said.get("forecast_because_guarded", 0) / bins
            rows.append((one["variant"], str(said.get("forecast_guard_trips", 0)), f"{guarded:.0%}", spoke))
    return table(("variant", "guard tripped", "bins under guard", "model that spoke"), rows) if rows else NOTHING


def failures(found: Record | None) -> str:
    """A row for each variant: who was lost, and how long it hurt."""
    header = (
        "variant", "requests", "lost", "failed", "moved", "within SLO", "TTFT P99, s", "LLM deaths",
        "LLM replicas at work", "seconds without any", "worst bin", "bins below SLO",
    )  # fmt: skip

    def row(one: Record, summary: Record) -> Sequence[str]:
        there = summary.get("availability", {}).get("llm", {"serving": 1.0, "seconds_without_any": 0.0})
        bins = [part for part in one["over_time"]["within_slo"] if part is not None]
        return (
            f"{summary['requests']:,}",
            f"{summary['lost']}",
            f"{summary['failed']:,}",
            f"{summary['attempts'] - summary['requests']:,}",
            f"{summary['within_slo']:.1%}",
            _number(summary["ttft_seconds"]["p99"]),
            f"{summary['counters'].get('llm_deaths', 0)}",
            f"{there['serving']:.0%}",
            f"{there['seconds_without_any']:.0f}",
            f"{min(bins):.0%}",
            f"{sum(part < found['scenario']['slo']['attainment'] for part in bins)} of {len(bins)}",
        )

    return _table(found, header, row)


def _table(found: Record | None, header: Sequence[str], row: Callable[[Record, Record], Sequence[str]]) -> str:
    if found is None:
        return NOTHING
    rows = [
        (one["variant"], *(row(one, one["summary"]) if "summary" in one else (one["error"],)))
        for one in found["results"]
    ]
    at = found["provenance"]
    return table(header, rows) + f"\nSimulated: revision {at['revision']}, seed {at['seed']}; `{at['command']}`.\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
