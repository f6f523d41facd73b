"""Simulate a measured wave on the pipeline: with the same arrivals, lengths and options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.sim_fidelity.pace import costs_at
from benchmarks.sim_fidelity.pipeline_fit import CORES, Fitted
from benchmarks.sim_fidelity.pipeline_loads import SAYS_EACH
from vllm_omni_sched.sim.costs.measured import write_calibration
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import build
from vllm_omni_sched.sim.workloads.trace import Exact, Header, write_trace

REPLICAS, MAX_NUM_SEQS, BATCHED_TOKENS, KV_TOKENS = 2, 8, 1024, 32_768
"""Of the stages as `benchmarks.stages` starts them."""
STAGES = ("thinker", "talker")


def write_calibrations(
    fitted: Fitted, folder: Path, pace: float = 1.0, source: Mapping[str, Any] | None = None
) -> dict[str, Path]:
    """Write a calibration file for each stage, at that pace, and return the files by stage."""
    found = {}
    for name, costs in zip(STAGES, fitted.stages, strict=True):
        found[name] = folder / f"{name}.json"
        write_calibration(found[name], {**(source or {}), "stage": name}, costs_at(pace, costs), KV_TOKENS)
    return found


def scenario(files: Mapping[str, Path], link_seconds: float, trace: Path, ours: bool, seed: int) -> dict[str, Any]:
    """Return the scenario of the pipeline; stock vLLM-Omni uses replicas in turn."""
    first, second = STAGES
    engine = {"kind": "engine", "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": BATCHED_TOKENS}
    return {
        "name": "text to text on two cores",
        "seed": seed,
        "duration_seconds": 3600.0,
        "workload": {"kind": "trace", "file": str(trace)},
        "cluster": {"host_cores": CORES},
        "stages": [
            {
                **engine,
                "name": first,
                "calibration": str(files[first]),
                "output": True,
                "link": {"latency_seconds": link_seconds},
            },
            {
                **engine,
                "name": second,
                "calibration": str(files[second]),
                "replicas": REPLICAS,
                "prompt_tokens": 1,
                "tokens_each": float(SAYS_EACH),
            },
        ],
        **({"orchestration": {}} if ours else {}),
    }


def simulated(fitted: Fitted, wave: Mapping[str, Any], folder: Path) -> dict[str, list[float]]:
    """Simulate one wave at its pace; return, by measure, the seconds of all requests and all gaps."""
    told, pace = wave["told"], wave["pace"]
    files = write_calibrations(fitted, folder, pace)
    trace = folder / "trace.jsonl"
    ordered = sorted(told, key=lambda one: one["at"])
    entries = [Exact(at=one["at"], text_tokens=one["prompt_tokens"], output_tokens=one["thinks"]) for one in ordered]
    write_trace(trace, Header(format="vllm-omni-sched trace", version=1, source="measured"), entries)
    raw = scenario(files, pace * fitted.link_seconds, trace, wave["variant"] == "ours", wave["seed"])
    result = simulate(build(raw, "pipeline", folder))
    records = sorted(result.records, key=lambda record: record.number)
    if len(records) != len(told):
        raise RuntimeError(f"{len(told)} requests were measured, and {len(records)} left the simulated pipeline")
    return {
        "TTFT": [one.ttft for one in records],
        "ITL": spread(result.gaps),
        "end to end": [one.end - one.arrival for one in records],
    }


def spread(histogram: Histogram) -> list[float]:
    """Return as many durations as the histogram has counted, in ascending order."""
    number = round(histogram.count)
    return [histogram.quantile((i + 0.5) / number) for i in range(number)]
