"""`vllm-omni-sched calibrate` on a tiny model: a file that says what its engine costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.harness.processes import ENVIRONMENT, ROOT, WORKER_IN_ENGINE_CORE
from vllm_omni_sched.sim.costs.fit import STEP_COSTS

ARGUMENTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "limit_mm_per_prompt": {"image": 2},
}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.once
def test_a_tiny_model_is_calibrated(llava: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    words = ["calibrate", str(llava), "--engine-args", json.dumps(ARGUMENTS), "--rounds", "1", "--longest", "300"]
    script = "import sys; from vllm_omni_sched.cli import app; app(sys.argv[1:])"
    ran = subprocess.run(
        [sys.executable, "-c", script, *words, "--no-lane", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **WORKER_IN_ENGINE_CORE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Exception ignored" not in ran.stderr  # destructors that run when their modules are gone
    found = json.loads(out.read_text())
    assert found["version"] == 1
    assert set(STEP_COSTS) <= set(found["step"])
    assert found["step"]["base_seconds"] > 0
    assert found["encode_in_lane"] is None
    assert set(found["encode"]) == set(found["frontend"]["per_item"]) == {"image"}
    assert found["kv_tokens"] > 1024
    assert found["source"]["image_size"] == [28, 28]
    # longer than what it has room for in one step: its steps were counted, and fitted
    assert found["residuals"]["points"] > len(STEP_COSTS)
    assert "step" in ran.stdout
