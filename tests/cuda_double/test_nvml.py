"""The double of NVML through `pynvml`, and the device metrics of this package where it has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest


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
