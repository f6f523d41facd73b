"""A calibration is written whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.measured import write_calibration

COSTS = {"step": {"base_seconds": 1e-3}, "answer_seconds": 1e-3}


def test_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, {"model": "tiny"}, COSTS, 1024)
    assert json.loads(path.read_text()) == {
        "format": "vllm-omni-sched calibration",
        "version": 1,
        "source": {"model": "tiny"},
        **COSTS,
        "kv_tokens": 1024,
    }
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match=r"calibration\.json: No space left"):
        write_calibration(path, {}, COSTS, 1024)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_calibration(tmp_path / "none" / "calibration.json", {}, COSTS, 1024)
