"""What the learned control brought beside the others, from the result file of the benchmark `learning`."""

from collections.abc import Mapping, Sequence
from typing import Any

from result_tables import NOTHING, source, table

Result = Mapping[str, Any]


def learning(results: Sequence[Result]) -> str:
    """By control: what `learned` has more; then by setting and control."""
    if not results:
        return NOTHING
    parts = []
    for result in results:
        found = result["results"]
        more = ((name, _points(gain)) for name, gain in found["learned_more"].items())
        parts.append(table(("beside", "learned has more, points within the SLO"), more))
        header = ("setting", "control", "within the SLO", "goodput /s", "P99 ITL", "P50 TTFT", "tokens/s")
        parts.append("\n" + table(header, map(_row, found["settings"])))
        parts.append(source(result).replace("medians", "simulated; means over seeds, with 95 % bootstrap intervals"))
    return "".join(parts)


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
