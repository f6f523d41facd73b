"""What the learned control brought beside the others, from the result file of the benchmark `learning`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from result_tables import NOTHING, source, table

from benchmarks.learning.settings import TEST

Result = Mapping[str, Any]


def learning(results: Sequence[Result]) -> str:
    """Show the gain of `learned` over each control, then the results by setting and control."""
    if not results:
        return NOTHING
    parts = []
    for result in results:
        found = result["results"]
        more = ((name, _points(gain)) for name, gain in found["learned_more"].items())
        parts.append(table(("beside", "learned has more, points within the SLO"), more))
        parts.append("\n" + _by_sizes(found["settings"]))
        header = ("setting", "control", "within the SLO", "goodput /s", "P99 ITL", "P50 TTFT", "tokens/s")
        parts.append("\n" + table(header, map(_row, found["settings"])))
        parts.append(source(result).replace("medians", "simulated; means over seeds, with 95 % bootstrap intervals"))
    return "".join(parts)


def _by_sizes(records: Sequence[Mapping[str, Any]]) -> str:
    """Show the gain apart for settings whose text and output sizes training has drawn too, and for the others."""
    seen = {setting.name for setting in TEST if setting.has_sizes_of_training}
    settings = list(dict.fromkeys(one["setting"] for one in records))
    groups = [[name for name in settings if name in seen], [name for name in settings if name not in seen]]
    rows = []
    for control in dict.fromkeys(one["control"] for one in records if one["control"] != "learned"):
        more = [
            [one["learned_more"][0] for one in records if one["control"] == control and one["setting"] in group]
            for group in groups
        ]
        rows.append((control, *(f"{100 * statistics.fmean(own):+.2f}" if own else "" for own in more)))
    counts = [f"{len(group)} setting{'' if len(group) == 1 else 's'}" for group in groups]
    header = ("beside", f"sizes drawn in training too ({counts[0]})", f"other sizes ({counts[1]})")
    return table(header, rows)


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    mean, low, high = (f"{100 * value:.1f}" for value in one["attainment"])
    return (
        one["setting"],
        one["control"],
        f"{mean} % [{low}, {high}]",
        f"{one['goodput'][0]:.2f}",
        f"{1e3 * one['itl_p99'][0]:.0f} ms",
        f"{one['ttft_p50'][0]:.3f} s",
        f"{one['throughput'][0]:,.0f}",
    )


def _points(gain: Sequence[float]) -> str:
    mean, low, high = (f"{100 * value:+.2f}" for value in gain)
    return f"{mean} [{low}, {high}]"
