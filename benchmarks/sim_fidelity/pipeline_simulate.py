"""One measured wave once more, on the simulated pipeline: the same arrivals, lengths and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sim_fidelity.pipeline_fit import Fitted
from benchmarks.sim_fidelity.pipeline_loads import SAYS_EACH
from vllm_omni_sched.sim.costs import calibration_file
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario import build, installed
from vllm_omni_sched.sim.workloads.trace import Exact, Header, write_trace

CORES, REPLICAS, AT_ONCE, BATCHED_TOKENS, KV_TOKENS = 2, 2, 8, 1024, 32_768
"""Of the machine, and of the stages as `benchmarks.stages` starts them."""
STAGES = ("thinker", "talker")


@dataclass(frozen=True)
class Simulated:
    """Of each request, in order of arrival, seconds to the first output and to the last; and all gaps."""

    ttft: list[float]
    end: list[float]
    itl: Histogram


def write_calibrations(fitted: Fitted, folder: Path, source: dict[str, Any]) -> dict[str, Path]:
    """A file for each stage, by its name."""
    found = {}
    for name, costs in zip(STAGES, fitted.stages, strict=True):
        found[name] = folder / f"{name}.json"
        calibration_file.write(found[name], {**source, "stage": name}, costs, KV_TOKENS)
    return found


def scenario(files: dict[str, Path], link_seconds: float, trace: Path, ours: bool, seed: int = 1) -> dict[str, Any]:
    """As `vllm_omni_sched.sim.scenario` has it: stock vLLM-Omni gives each replica its turn."""
    first, second = STAGES
    engine = {"kind": "engine", "max_num_seqs": AT_ONCE, "max_num_batched_tokens": BATCHED_TOKENS}
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


def simulated(
    files: dict[str, Path], link_seconds: float, told: Sequence[dict[str, Any]], ours: bool, folder: Path, seed: int = 1
) -> Simulated:
    """Of one wave as `pipeline_serve.py` tells it."""
    trace = folder / "trace.jsonl"
    ordered = sorted(told, key=lambda one: one["at"])
    entries = [Exact(at=one["at"], text_tokens=one["prompt_tokens"], output_tokens=one["thinks"]) for one in ordered]
    write_trace(trace, Header(format="vllm-omni-sched trace", version=1, source="measured"), entries)
    result = simulate(build(scenario(files, link_seconds, trace, ours, seed), "pipeline", folder, installed()))
    records = sorted(result.records, key=lambda record: record.number)
    if len(records) != len(told):
        raise RuntimeError(f"{len(told)} requests were measured, and {len(records)} left the simulated pipeline")
    return Simulated([one.ttft for one in records], [one.end - one.arrival for one in records], result.gaps)
