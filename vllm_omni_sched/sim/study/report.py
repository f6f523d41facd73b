"""Summarise points over several seeds, and write the JSON file of a study or of one run."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_omni_sched.sim.output import provenance, replacing
from vllm_omni_sched.sim.study.evaluate import Finding
from vllm_omni_sched.sim.study.plan import Study

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
"""Measures that are compared between points, and their place in a finding."""


def measure(finding: Finding, name: str) -> float | None:
    """Return one of `MEASURES`; None if the finding does not have it."""
    first, *rest = MEASURES[name]
    at: Any = getattr(finding, first)
    for key in rest:
        at = at.get(key) if isinstance(at, Mapping) else None
    return None if at is None else float(at)


# Student's t, two-sided 95 %, by degrees of freedom from 1 on
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds, and half of its 95 % interval by Student's t; 0 if there is a single seed."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, 0.0
    t = _T[min(len(values) - 1, len(_T)) - 1]
    return mean, t * statistics.stdev(values) / len(values) ** 0.5


def ratio_interval(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two systems under the same seeds, and its 95 % interval.

    The interval is Student's t over the logarithms of the ratios seed by seed.

    Raises:
        ValueError: the numbers of values differ, or one is not above 0.
    """
    if len(ours) != len(other) or not all(value > 0 for value in (*ours, *other)):
        raise ValueError(f"a ratio needs equally many values of both, all above 0, got {list(ours)} and {list(other)}")
    mean, half = interval([math.log(one / two) for one, two in zip(ours, other, strict=True)])
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def values_of(group: Iterable[Finding], name: str) -> list[float]:
    """Return one of `MEASURES` of all findings that have it, in rising order."""
    return sorted(value for one in group if (value := measure(one, name)) is not None)


def groups(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Group findings that differ by their seed alone, in the order of the first of each; failed ones are left out."""
    together: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if not finding.error:
            together.setdefault((finding.variant, repr(sorted(finding.values.items()))), []).append(finding)
    return list(together.values())


def spread(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the seeds of each point, and for each measure the median, least, most and mean with its `interval`.

    Measures that a point does not have are left out.
    """
    rows = []
    for group in groups(findings):
        row: dict[str, Any] = {
            "variant": group[0].variant,
            "values": dict(group[0].values),
            "seeds": sorted(one.seed for one in group),
        }
        for name in MEASURES:
            if values := values_of(group, name):
                row[name] = {"median": statistics.median(values), "least": values[0], "most": values[-1]}
                mean, half = interval(values)
                row[name] |= {"mean": mean, "low": mean - half, "high": mean + half}
        rows.append(row)
    return rows


def report(
    study: Study, findings: Sequence[Finding], command: Sequence[str], interrupted: bool = False
) -> dict[str, Any]:
    """Return all findings as JSON; numbers that are not finite become null.

    ``results`` has a record for each point, with bins over time if replicas come and go, and
    ``spread`` over seeds if there are several. ``interrupted``, if it was: the number of points, and of all points.
    """
    base, changes = study.base, study.changes
    sources = {stage: text for finding in findings for stage, text in finding.sources.items()}
    recorded: set[str] = set()  # points whose choices are in a record of another seed
    records = []
    for finding in findings:
        record = {
            "variant": finding.variant,
            "values": finding.values,
            "seed": finding.seed,
            "runs": finding.runs,
            **({"error": finding.error} if finding.error else {"summary": finding.summary}),
            **({"over_time": finding.over_time} if changes and finding.over_time else {}),
            **({"found": finding.found} if finding.found is not None else {}),
        }
        if finding.tuned is not None and finding.label not in recorded:
            recorded.add(finding.label)
            record["tuned"] = finding.tuned
        records.append(record)
    body = {
        "simulated": True,
        "scenario": scenario_record(study),
        "provenance": provenance(command, base.seed, sources, base.workload.kind),
        **({"interrupted": {"points": len(findings), "of": len(study.points)}} if interrupted else {}),
        "results": records,
        **({"spread": spread(findings)} if study.repeats > 1 else {}),
    }
    return dict(_finite(body))


def scenario_record(study: Study) -> dict[str, Any]:
    """Return the scenario as written, without defaults; files by their names alone."""
    record: dict[str, Any] = study.base.model_dump(mode="json", exclude_unset=True)
    for holder in [*record["stages"], record["workload"]["options"]]:
        for key in ("calibration", "file"):
            if isinstance(holder.get(key), str):
                holder[key] = Path(holder[key]).name
    return record


def write(path: Path, body: Mapping[str, Any]) -> None:
    """Write the file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as file:
        json.dump(body, file, indent=1, allow_nan=False)
        file.write("\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
