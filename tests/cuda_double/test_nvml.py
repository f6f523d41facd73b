"""The double of NVML through `pynvml`, and the device metrics of this package on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_omni_sched.engine.metrics.nvml import NvmlDevices


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what NVML says: keys of ``native/nvml.c``, with ``_`` for the dot."""
    file = tmp_path / "figures"
    monkeypatch.setenv("CUDA_DOUBLE_NVML", str(file))

    def write(**values: int) -> None:
        lines = (f"{name.removeprefix('gpu').replace('_', '.', 1)} {value}\n" for name, value in values.items())
        file.write_text("".join(lines))

    write()
    return write


def test_device_metrics_are_the_figures_of_nvml(figures: Any) -> None:
    figures(gpu0_gpu=40, gpu0_used=3 << 20, gpu0_total=8 << 20, gpu0_decoder=25, gpu0_encoder=-3, gpu1_gpu=100)
    one, other = NvmlDevices(environ={}).read()
    assert (one.utilization, one.decoder_utilization, one.encoder_utilization) == (0.4, 0.25, None)
    assert (one.memory_used_bytes, one.memory_total_bytes) == (3 << 20, 8 << 20)
    assert (other.index, other.name, other.utilization) == (1, "CUDA double 1", 1.0)
    assert one.uuid != other.uuid


def test_a_device_that_is_lost_is_left_out_until_it_answers_again(
    figures: Any, caplog: pytest.LogCaptureFixture
) -> None:
    devices = NvmlDevices(environ={})
    assert len(devices.read()) == 2
    figures(gpu1_handle=-15)
    assert [reading.index for reading in devices.read()] == [0]
    assert "GPU 1 (CUDA double 1) no longer answers NVML: GPU is lost" in caplog.text
    figures()
    assert [reading.index for reading in devices.read()] == [0, 1]
    assert "GPU 1 (CUDA double 1) answers NVML again" in caplog.text


def test_without_a_driver_there_are_no_metrics_until_it_is_loaded(figures: Any) -> None:
    figures(init=-9)
    devices = NvmlDevices(environ={})
    assert devices.read() == []
    assert devices.reason == "NVML cannot be used: Driver Not Loaded"
    figures(count=1)
    assert len(devices.read()) == 1
    assert devices.reason == ""


@pytest.mark.parametrize(
    ("visible", "indices"), [("1", [1]), ("0,1", [0, 1]), ("", []), ("GPU-63756461-2d64-6f75-626c-652d75756931", [1])]
)
def test_devices_that_this_process_may_not_use_are_left_out(figures: Any, visible: str, indices: list[int]) -> None:
    devices = NvmlDevices(environ={"CUDA_VISIBLE_DEVICES": visible})
    assert [reading.index for reading in devices.read()] == indices
