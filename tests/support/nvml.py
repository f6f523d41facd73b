"""A double of the functions of the module ``pynvml``, for faults that no machine has on demand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

DEVICE_CALLS = (
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetEncoderUtilization",
)
"""Functions that take the handle of a device."""


class FakeNvml:
    """Devices with made-up values. ``broken``: calls that raise, by name or by name and device."""

    class NVMLError(Exception):
        pass

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.broken: dict[str | tuple[str, int], str] = {}
        self.inits = 0
        for name, value in {
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}aa",
            "nvmlDeviceGetName": lambda index: f"NVIDIA H{index}00",
            "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(used=(1 + index) << 30, total=80 << 30),
            "nvmlDeviceGetUtilizationRates": lambda index: SimpleNamespace(gpu=40 + index, memory=9),
            "nvmlDeviceGetDecoderUtilization": lambda index: [70 + index, 167000],
            "nvmlDeviceGetEncoderUtilization": lambda index: [index, 167000],
        }.items():
            setattr(self, name, self._of_device(name, value))

    def _of_device(self, name: str, value: Callable[[int], Any]) -> Callable[[int], Any]:
        def call(handle: int) -> Any:
            self._check(name, handle)
            return value(handle)

        return call

    def _check(self, name: str, index: int | None = None) -> None:
        why = self.broken.get(name) or (self.broken.get((name, index)) if index is not None else None)
        if why:
            raise self.NVMLError(why)

    def lose(self, index: int) -> None:
        """Let every call about a device raise, as after it has fallen off the bus."""
        for name in DEVICE_CALLS:
            self.broken[name, index] = "GPU is lost"

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.inits += 1

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return self.devices

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._check("nvmlDeviceGetHandleByIndex", index)
        return index
