"""The double of NVML through `pynvml`, and the device metrics of this package on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
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


def test_figures_are_those_that_were_set(figures: Any) -> None:
    figures(count=1, gpu0_gpu=40, gpu0_decoder=25, gpu0_used=3 << 20)
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 1
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 40
    assert pynvml.nvmlDeviceGetDecoderUtilization(handle)[0] == 25
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == 3 << 20
    figures(count=1, gpu0_gpu=41)
    assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 41


def test_errors_are_those_of_nvml(figures: Any) -> None:
    figures(init=-9)
    with pytest.raises(pynvml.NVMLError, match="Driver Not Loaded"):
        pynvml.nvmlInit()
    figures(gpu1_handle=-15, gpu0_encoder=-3)
    pynvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError, match="GPU is lost"):
        pynvml.nvmlDeviceGetHandleByIndex(1)
    with pytest.raises(pynvml.NVMLError, match="Not Supported"):
        pynvml.nvmlDeviceGetEncoderUtilization(pynvml.nvmlDeviceGetHandleByIndex(0))
    with pytest.raises(pynvml.NVMLError, match="Invalid Argument"):
        pynvml.nvmlDeviceGetHandleByIndex(2)


def test_nvml_names_the_devices_as_cuda_does() -> None:
    import torch

    pynvml.nvmlInit()
    for index in range(2):
        uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
        assert uuid == f"GPU-{torch.cuda.get_device_properties(index).uuid}"


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
