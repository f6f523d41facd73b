"""Predict what clients will see, with `vllm-omni-sched simulate` and calibrated costs, before anything is measured."""

from __future__ import annotations

import datetime
import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.backtest import ENGINE, POLICY, SIMULATIONS, SLO, WARM_UP_SECONDS
from benchmarks.backtest.figures import FIGURES
from vllm_omni_sched.sim.measure import Result
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load

_TOML = """\
name = "back-test of {trace}, {variant}"
duration_seconds = {duration}
warm_up_seconds = {warm_up}

[slo]
ttft_seconds = {ttft_seconds}
itl_seconds = {itl_seconds}

[policy]
profile = "{profile}"

[workload]
kind = "trace"
file = "{trace}.jsonl"

[[stages]]
kind = "engine"
name = "llm"
calibration = "{calibration}"
max_num_seqs = {max_num_seqs}
max_num_batched_tokens = {max_num_batched_tokens}
max_model_len = {max_model_len}
lane_items = 2
lane_on = "beside"
"""


def write_scenario(folder: Path, trace: str, variant: str, seconds: float, calibration: Path) -> Path:
    """Write the scenario of one trace and variant beside the trace, as a user would, and return its file."""
    path = folder / f"{trace}-{variant}.toml"
    path.write_text(
        _TOML.format(
            trace=trace,
            variant=variant,
            duration=WARM_UP_SECONDS + seconds,
            warm_up=WARM_UP_SECONDS,
            profile=POLICY[variant]["profile"],
            calibration=calibration.resolve(),
            **SLO,
            **{name: ENGINE[name] for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")},
        )
    )
    return path


def predict(scenario: Path) -> dict[str, dict[str, float]]:
    """Return the median of each figure over simulations with unlike draws, and its least and most."""
    found = [figures(simulate(load(scenario, {"seed": seed}))) for seed in range(SIMULATIONS)]
    return {
        name: {
            "predicted": statistics.median(one[name] for one in found),
            "least": min(one[name] for one in found),
            "most": max(one[name] for one in found),
        }
        for name in FIGURES
    }


def figures(result: Result) -> dict[str, float]:
    """Return the figures of a simulation; times in seconds."""
    summary = result.summary()
    found = {
        f"{name} {part}": summary[key][part.lower()]
        for name, key in (("TTFT", "ttft_seconds"), ("ITL", "itl_seconds"), ("end to end", "latency_seconds"))
        for part in ("P50", "P99")
    }
    ends = max(record.end for record in result.records)
    begins = min(record.arrival for record in result.records)
    tokens = sum(record.output_tokens for record in result.records)
    return found | {"tokens / s": tokens / (ends - begins), "within SLO": result.attainment}


def seal(path: Path, predictions: list[dict[str, Any]], **about: Any) -> None:
    """Write the predictions with the time."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    path.write_text(json.dumps({"date": date, **about, "predictions": predictions}, indent=1) + "\n")


def hash_of(path: Path) -> str:
    """Return the SHA-256 of the file, which the result repeats."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
