"""Write the JSON file of a study or of one run: `{"simulated", "scenario", "provenance", "results"}`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_omni_sched.sim.output.files import provenance, replacing
from vllm_omni_sched.sim.study.evaluate import Finding
from vllm_omni_sched.sim.study.plan import Study
from vllm_omni_sched.sim.study.spread import spread


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
