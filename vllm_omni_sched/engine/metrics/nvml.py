"""Read the NVIDIA devices of this host through NVML, without ever delaying a scrape of ``/metrics``."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.extras import how_to_install
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.device_metrics import DeviceReading

logger = get_logger(__name__)

COPY = Path("third_party", "pynvml.py")
"""vLLM's copy of nvidia-ml-py, in its folder."""
_COPY_NAME = "vllm_pynvml"
WAIT_SECONDS = 0.2  # that a scrape waits for the devices
KEEP_SECONDS = 30.0  # that a reading is used while the next one is not there


def load_library() -> Any | None:
    """Return the Python module of NVML, that of nvidia-ml-py or vLLM's copy of it; None if there is none."""
    for load in (_installed, _vllm_copy):
        try:
            module = load()
        except ImportError:
            continue
        if hasattr(module, "nvmlDeviceGetUtilizationRates"):
            return module
    return None


def _installed() -> Any:
    return import_module("pynvml")


def _vllm_copy() -> Any:
    """Return vLLM's copy by its file: to import it by name, `doctor` would have to import all of vLLM."""
    vllm = find_spec("vllm")
    file = Path((vllm.submodule_search_locations or ["."])[0]) / COPY if vllm is not None else COPY
    spec = spec_from_file_location(_COPY_NAME, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"{file} is not there")
    module = sys.modules[_COPY_NAME] = module_from_spec(spec)  # it looks itself up there
    spec.loader.exec_module(module)
    return module


class NvmlDevices:
    """Reads the devices that this process may use.

    1. NVML is initialised at the first reading. If that fails, `reason` says why, and the next reading tries again.
    2. A value that raises an NVML error is None: some devices have no video encoder, and parts of a device (MIG) tell
       no utilisation.
    3. A device that stops answering is left out. One warning is logged, and later readings try it again.
    4. Devices that ``CUDA_VISIBLE_DEVICES`` hides are left out. All are read if it names parts of devices (MIG).

    Nothing raises.

    Args:
        load: returns the Python module of NVML, None if there is none; called at the first reading.
        environ: the environment variables.
    """

    def __init__(self, load: Callable[[], Any | None] = load_library, environ: Mapping[str, str] = os.environ) -> None:
        self._load = load
        self._nvml: Any | None = None
        self._names = _names_in(environ.get("CUDA_VISIBLE_DEVICES"))
        self._initialised = False
        self._answered: dict[int, str] = {}  # names of devices that have answered, by index
        self._lost: set[int] = set()
        self.reason = "no device has been looked for yet"

    def read(self) -> list[DeviceReading]:
        """Return the devices that answer; if there are none, `reason` says why."""
        nvml = self._nvml = self._nvml or self._load()
        if nvml is None:
            self.reason = f"NVML is not installed: {how_to_install('gpu')}"
            return []
        try:
            if not self._initialised:
                nvml.nvmlInit()
                self._initialised = True
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            self._initialised = False
            self.reason = f"NVML cannot be used: {error}"
            self._lose_all()
            return []
        readings = [one for index in range(count) if (one := self._device(index)) is not None]
        if readings:
            self.reason = ""
        elif not count:
            self.reason = "NVML finds no device"
        elif self._lost:
            self.reason = "no device answers"
        else:
            self.reason = "CUDA_VISIBLE_DEVICES hides all devices, or none of them answers"
        return readings

    def _device(self, index: int) -> DeviceReading | None:
        """Return the state of a device; None if it is hidden or does not answer."""
        nvml = self._nvml
        assert nvml is not None
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            self._lose(index, error)
            return None
        uuid = _text(self._try(nvml.nvmlDeviceGetUUID, handle))
        if not self._is_visible(index, uuid):
            return None
        memory = self._try(nvml.nvmlDeviceGetMemoryInfo, handle)
        busy = self._try(nvml.nvmlDeviceGetUtilizationRates, handle)
        decoder = self._try(nvml.nvmlDeviceGetDecoderUtilization, handle)
        encoder = self._try(nvml.nvmlDeviceGetEncoderUtilization, handle)
        reading = DeviceReading(
            index,
            uuid,
            _text(self._try(nvml.nvmlDeviceGetName, handle)) or "NVIDIA device",
            None if busy is None else busy.gpu / 100,
            None if decoder is None else decoder[0] / 100,
            None if encoder is None else encoder[0] / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
        )
        if not reading.answers:
            self._lose(index, "it tells none of its values")
            return None
        self._answered[index] = reading.name
        if index in self._lost:
            self._lost.discard(index)
            logger.info("GPU %d (%s) answers NVML again", index, reading.name)
        return reading

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any | None:
        """Return the result of a call, None if it raises an NVML error."""
        assert self._nvml is not None
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None

    def _is_visible(self, index: int, uuid: str) -> bool:
        if self._names is None:
            return True
        return any(name == str(index) or (name.startswith("GPU-") and uuid.startswith(name)) for name in self._names)

    def _lose(self, index: int, why: object) -> None:
        """Warn once of a device that has answered before."""
        if index in self._answered and index not in self._lost:
            self._lost.add(index)
            name = self._answered[index]
            logger.warning(
                "GPU %d (%s) no longer answers NVML: %s; its metrics are absent until it does", index, name, why
            )

    def _lose_all(self) -> None:
        for index in self._answered:
            self._lose(index, self.reason)


def _text(value: str | bytes | None) -> str:
    """Return a text of NVML, which old versions of its module give as bytes; "" for None."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _names_in(visible: str | None) -> list[str] | None:
    """Return the names of the visible devices, None if all may be visible; a name that is invalid ends the list."""
    if visible is None:
        return None
    names: list[str] = []
    for name in (one.strip() for one in visible.split(",")):
        if name.startswith("MIG-"):
            return None
        if not (name.isdigit() or name.startswith("GPU-")):
            break
        names.append(name)
    return names


class DeviceSampler:
    """Reads devices in a thread of its own, since a driver in trouble may not answer for seconds.

    Args:
        read: reads the devices.
        clock: monotonic.
        wait_seconds: how long a caller waits for a new reading; then it gets the last one.
    """

    def __init__(
        self,
        read: Callable[[], list[DeviceReading]],
        clock: Clock = monotonic_seconds,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._read, self._clock, self._wait_seconds = read, clock, wait_seconds
        self._condition = threading.Condition()
        self._is_reading = False
        self._readings: list[DeviceReading] = []
        self._read_at = float("-inf")

    def latest(self) -> list[DeviceReading]:
        """Return a new reading, or the last one if that takes too long; empty if it is older than `KEEP_SECONDS`."""
        with self._condition:
            if not self._is_reading:
                self._is_reading = True
                try:
                    threading.Thread(target=self._sample, name="omni-sched-devices", daemon=True).start()
                except RuntimeError:  # the process ends, or has too many threads
                    self._is_reading = False
            self._condition.wait_for(lambda: not self._is_reading, self._wait_seconds)
            return self._readings if self._clock() - self._read_at <= KEEP_SECONDS else []

    def _sample(self) -> None:
        readings: list[DeviceReading] = []
        try:
            readings = self._read()
        finally:
            with self._condition:
                self._readings, self._read_at = readings, self._clock()
                self._is_reading = False
                self._condition.notify_all()
