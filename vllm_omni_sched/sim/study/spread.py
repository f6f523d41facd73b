"""The same point with several seeds, as one."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_omni_sched.sim.study.evaluate import Finding

MEASURES = {
    "value": ("found", "value"),
    "ttft_p50_seconds": ("summary", "ttft_seconds", "p50"),
    "ttft_p99_seconds": ("summary", "ttft_seconds", "p99"),
    "itl_p50_seconds": ("summary", "itl_seconds", "p50"),
    "itl_p99_seconds": ("summary", "itl_seconds", "p99"),
    "latency_p99_seconds": ("summary", "latency_seconds", "p99"),
    "within_slo": ("summary", "within_slo"),
    "goodput_per_second": ("summary", "goodput_per_second"),
    "tokens_per_second": ("summary", "tokens_per_second"),
    "gpu_hours_per_1000_requests": ("summary", "gpu_hours_per_1000_requests"),
}
"""What is compared between points, and where a finding has it."""


def measure(finding: Finding, name: str) -> float | None:
    """One of `MEASURES`; None where the finding has none."""
    first, *rest = MEASURES[name]
    at: Any = getattr(finding, first)
    for key in rest:
        at = at.get(key) if isinstance(at, Mapping) else None
    return None if at is None else float(at)


def groups(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings that differ by their seed alone together, in the order of the first of each; failed ones left out."""
    together: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if not finding.error:
            together.setdefault((finding.variant, repr(sorted(finding.values.items()))), []).append(finding)
    return list(together.values())


def spread(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """For each point its seeds, and the median, least and most of each measure that it has."""
    rows = []
    for group in groups(findings):
        row: dict[str, Any] = {
            "variant": group[0].variant,
            "values": dict(group[0].values),
            "seeds": sorted(one.seed for one in group),
        }
        for name in MEASURES:
            values = [value for one in group if (value := measure(one, name)) is not None]
            if values:
                row[name] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
        rows.append(row)
    return rows
