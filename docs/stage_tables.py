"""Tables of what the benchmarks of stages have measured, from the result files they leave."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from result_tables import NOTHING, Result, source, table


def stages(results: Sequence[Result]) -> str:
    """Show all tasks in one table: stock and ours (medians), the ratio with its interval, and the bar.

    Left out are what a task has simulated beside, and measures without a bar or an interval; of throughput, all
    without a bar, and the interval of a single round.
    """
    rows = [
        (
            f"{record['task']}, {record['ours']['samples']} rounds",
            record["measure"] + (", s" if record["unit"] == "seconds" else f", {record['unit']}"),
            *(_median(record.get(name)) for name in ("stock", "ours")),
            _ratio(record),
            f"{record['bar']:g}, {'met' if record['met'] else 'missed'}" if "bar" in record else "",
        )
        for result in results
        for record in result["results"]
        if not record.get("simulated") and _shown(record)
    ]
    told = "".join(dict.fromkeys(map(source, results)))
    return "\n" + table(("task", "measure", "stock", "ours", "of stock", "bar"), rows) + told if rows else NOTHING


def _shown(record: Mapping[str, Any]) -> bool:
    if record["task"] == "throughput":
        return "bar" in record
    return "bar" in record or ("of_stock" in record and record["unit"] in ("seconds", "times"))


def _median(summary: Mapping[str, float] | None) -> str:
    return f"{summary['median']:.3g}" if summary else ""


def _ratio(record: Mapping[str, Any]) -> str:
    if "of_stock" not in record:
        return ""
    if "of_stock_low" not in record or record["ours"]["samples"] == 1:
        return f"{record['of_stock']:.2f}"
    return f"{record['of_stock']:.2f} [{record['of_stock_low']:.2f}, {record['of_stock_high']:.2f}]"


def anomaly(results: Sequence[Result]) -> str:
    """Show each fault: false alarms with the rate that so many hours exclude, and the time to detection."""
    parts = []
    for result in results:
        rows = []
        for fault in dict.fromkeys(record["fault"] for record in result["results"]):
            own = [record for record in result["results"] if record["fault"] == fault]
            found = [one["found_after_seconds"] for one in own if one["found_after_seconds"] is not None]
            hours = sum(one["healthy_hours"] for one in own)
            # Only these hours are counted: how long each run went before its fault is not in the file.
            bound = most_events(sum(one["false_alarms"] for one in own)) / hours
            rows.append(
                (
                    fault,
                    f"{hours:g}",
                    str(sum(one["false_alarms"] + one["false_alarms_before_fault"] for one in own)),
                    f"{bound:.2g}",
                    f"{len(found)} of {len(own)}",
                    *((f"{statistics.median(found):.0f}", f"{max(found):.0f}") if found else ("", "")),
                )
            )
        header = (
            "fault",
            "hours without it",
            "false alarms",
            "so at most, per hour",
            "found",
            "after, median s",
            "worst s",
        )
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


def most_events(seen: int, confidence: float = 0.95) -> float:
    """Return the largest Poisson mean under which `seen` or fewer come with probability ``1 - confidence``.

    The one-sided upper limit; of none seen it is 3.0, the rule of three.
    """
    low, high = 0.0, 10.0 * (seen + 3)
    while high - low > 1e-9 * high:
        mean = (low + high) / 2
        at_most_seen = sum(math.exp(-mean) * mean**n / math.factorial(n) for n in range(seen + 1))
        low, high = (mean, high) if at_most_seen > 1 - confidence else (low, mean)
    return high
