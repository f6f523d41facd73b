"""The tables of `docs/studies/scale.md`, of a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def tables(results: Mapping[str, Any]) -> str:
    """Return the tables in Markdown: by GPUs, by rate, decisions within a run, and decisions with many waiting."""
    scale = _table(
        ("policies", "modules", "GPUs", "events", "events/s", "processor s per simulated s", "µs per request",
         "peak MiB"),
        (
            (row["variant"], _modules(row), f"{row['gpus']:,}", f"{row['events']:,}", f"{row['events_per_second']:,}",
             f"{row['cpu_seconds_per_simulated_second']:.3g}", f"{row['cpu_us_per_request']:,.0f}",
             f"{row['peak_mib']:,}")
            for row in results["scale"]
        ),
    )  # fmt: skip
    rates = _table(
        ("policies", "modules", "requests/s for each of 100 GPUs", "events/s", "processor s per simulated s"),
        (
            (row["variant"], _modules(row), f"{row['rate_per_gpu']:g}",
             f"{row['events_per_second']:,}", f"{row['cpu_seconds_per_simulated_second']:.3g}")
            for row in results["rates"]
        ),
    )  # fmt: skip
    exponents = _table(
        ("policies", "exponent against GPUs", "against the rate"),
        (
            (name, f"{value:.2f}", f"{results['exponent_by_rate'][name]:.2f}")
            for name, value in results["exponent_by_gpus"].items()
        ),
    )
    within = _table(
        ("scenario", "GPUs", "decision", "calls", "mean µs"),
        (
            (row["variant"], f"{row['gpus']:,}", name, f"{one['calls']:,}", f"{one['mean_us']:.1f}")
            for row in results["decisions"]
            for name, one in row["decisions"].items()
        ),
    )
    waiting = _table(
        ("decision", "waiting", "median µs"),
        ((row["decision"], f"{row['waiting']:,}", f"{row['median_us']:.1f}") for row in results["waiting"]),
    )
    return "\n\n".join((scale, exponents, rates, within, waiting))


def _modules(row: Mapping[str, Any]) -> str:
    return "compiled" if row.get("compiled") else "Python"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
