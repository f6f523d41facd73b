"""`vllm-omni-sched calibrate` on a tiny model: a file that says what its engine costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dev.child_process import ChildProcess
from tests.engine.harness.processes import ENVIRONMENT, WORKER_IN_ENGINE_CORE
from tests.support.warm import WarmPopen
from vllm_omni_sched.sim.costs.fit import STEP_COSTS

PROGRAM = "tests.engine.harness.calibrate"
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
    words = [str(llava), "--engine-args", json.dumps(ARGUMENTS), "--rounds", "1", "--longest", "300"]
    process = ChildProcess(
        [sys.executable, "-m", PROGRAM, *words, "--no-lane", "--server", "--starts", "2", "--out", str(out)],
        log=tmp_path / "log",
        env={**ENVIRONMENT, **WORKER_IN_ENGINE_CORE},
        start=WarmPopen,
    )
    with process:
        assert process.wait() == 0, process.last_lines(40)
    said = process.log.read_text()
    assert "Exception ignored" not in said  # destructors that run when their modules are gone
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
    assert "step" in said
    # behind a server
    assert {"per_request", "per_text_token", "per_step", "per_output"} <= set(found["frontend"])
    assert "for each output" in said
    # of each start of the server
    assert set(found["starts"]) == {"server"}
    assert len(found["starts"]["server"]["steps"]) == len(found["starts"]["server"]["first_tokens"]) == 2
    assert "steps of single starts of the server" in " ".join(said.split())
    # and with requests of all kinds at once
    assert set(found["under_load"]) == {"server"}
    assert "under requests of all kinds at once" in " ".join(said.split())
