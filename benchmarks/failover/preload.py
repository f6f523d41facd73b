"""Measure a restart whose checkpoint is not in the page cache, with and without reading it ahead."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.harness.child import Child
from benchmarks.harness.provenance import ROOT
from benchmarks.stages.record import entry
from dev.omni_cpu.distribution import environment
from dev.omni_cpu.spec import TEXT_TO_TEXT, PipelineSpec
from dev.tiny_models.llama import write_llama

TASK = "preload"
LAYERS, HIDDEN = 32, 1024  # 1.4 GB
MODEL_LENGTH = 64  # nothing is asked; the KV cache of a pipeline on the CPU holds so many tokens of such a model
STOCK, OURS = "off", "on"


def run(rounds: int, rng: Random) -> list[dict[str, Any]]:
    """Start a pipeline without and one with `runtime.preload`, and let a replica of each start again."""
    model = write_llama(ROOT / ".models" / "llama-large", layers=LAYERS, hidden=HIDDEN)
    found = {name: restarts(model, name == OURS, rounds) for name in rng.sample((STOCK, OURS), 2)}
    seconds = {name: [one["seconds"] for one in found[name]] for name in found}
    records = [entry(TASK, "start of a replica, checkpoint not in the page cache", seconds[OURS], seconds[STOCK])]
    cold = [one["cold"] for each in found.values() for one in each]
    records.append(entry(TASK, "of the checkpoint, not in the page cache before", cold, unit="fraction"))
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    records.append(entry(TASK, "checkpoint", [nbytes / 1e9], unit="GB"))
    return records


def restarts(model: Path, preload: bool, rounds: int) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="failover-"))
    try:
        options = {
            "runtime": {"recovery": {"max_restarts": 99}, "preload": {"enabled": preload}},
        }
        spec = PipelineSpec(TEXT_TO_TEXT, "full_payload", scheduling=options, max_model_len=MODEL_LENGTH)
        around = environment(folder / "site", {})
        path = [Path(word) for word in around.pop("PYTHONPATH").split(":")]
        words = ["--model", str(model), "--folder", str(folder), "--spec", json.dumps(spec.to_json())]
        words += ["--rounds", str(rounds)]
        with Child("benchmarks.failover.restarts", words, path=path, environment=around) as child:
            return [event for event in child.events() if event["kind"] == "restart"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
