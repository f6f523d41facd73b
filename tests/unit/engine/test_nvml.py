"""Utilisation and memory of devices: what NVML tells is on /metrics, and what it does not tell is absent."""

from __future__ import annotations

import sys
import threading
from queue import Queue

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.nvml import DEVICE_CALLS, FakeNvml
from vllm_omni_sched.engine.metrics import nvml
from vllm_omni_sched.engine.metrics.nvml import KEEP_SECONDS, DeviceSampler, NvmlDevices
from vllm_omni_sched.monitor.device_metrics import DeviceCollector, DeviceReading

VALUES = {
    "nvmlDeviceGetMemoryInfo": {"memory_used_bytes", "memory_total_bytes"},
    "nvmlDeviceGetUtilizationRates": {"utilization_ratio"},
    "nvmlDeviceGetDecoderUtilization": {"decoder_utilization_ratio"},
    "nvmlDeviceGetEncoderUtilization": {"encoder_utilization_ratio"},
}
ALL = set().union(*VALUES.values())


@pytest.fixture
def fake() -> FakeNvml:
    return FakeNvml()


def devices_of(fake: FakeNvml | None, visible: str | None = None) -> NvmlDevices:
    return NvmlDevices(lambda: fake, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


def page(devices: NvmlDevices) -> dict[tuple[str, str], float]:
    """Return the samples on a page by metric and device."""
    registry = CollectorRegistry()
    registry.register(DeviceCollector(devices.read))
    return {
        (sample.name.removeprefix("vllm:omni_sched_device_"), sample.labels["device"]): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("call", DEVICE_CALLS)
def test_a_value_that_a_device_does_not_tell_is_absent_and_the_others_are_there(fake: FakeNvml, call: str):
    fake.broken[call, 1] = "Not Supported"
    found = page(devices_of(fake))
    assert {name for name, device in found if device == "0"} == ALL
    assert {name for name, device in found if device == "1"} == ALL - VALUES.get(call, set())


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount"])
def test_without_nvml_nothing_is_told_but_the_reason_and_later_it_is_tried_again(fake: FakeNvml, call: str):
    fake.broken[call] = "Driver Not Loaded"
    devices = devices_of(fake)
    assert page(devices) == {}
    assert devices.reason == "NVML cannot be used: Driver Not Loaded"
    fake.broken.clear()
    assert {name for name, _ in page(devices)} == ALL
    assert devices.reason == ""


def test_the_copy_in_vllm_is_used_where_the_module_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # its import raises ImportError
    library = nvml.load_library()
    assert library is not None
    assert library.__file__.endswith(str(nvml.COPY))
    devices = NvmlDevices(lambda: library)
    assert bool(devices.read()) == (devices.reason == "")  # whatever this machine has, it is told without an exception


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        (None, {"0", "1"}),
        ("0,1", {"0", "1"}),
        ("1", {"1"}),
        ("GPU-1a", {"1"}),
        ("", set()),
        ("0,-1,1", {"0"}),  # an invalid name hides those after it
        ("MIG-GPU-1aa/1/0", {"0", "1"}),
    ],
)
def test_hidden_devices_are_left_out(fake: FakeNvml, visible: str | None, shown: set[str]):
    devices = devices_of(fake, visible)
    assert {device for _, device in page(devices)} == shown
    assert shown or "CUDA_VISIBLE_DEVICES hides all devices" in devices.reason


def reading(index: int) -> DeviceReading:
    return DeviceReading(index, "", "", utilization=0.5)


def test_a_driver_that_does_not_answer_delays_no_scrape():
    """The clock and the driver are stepped by hand."""
    now, begun, answers = [0.0], threading.Semaphore(0), Queue[DeviceReading]()

    def read() -> list[DeviceReading]:
        begun.release()
        return [answers.get()]

    sampler = DeviceSampler(read, lambda: now[0], wait_seconds=60.0)
    answers.put(reading(1))
    assert sampler.latest() == [reading(1)]
    assert begun.acquire(blocking=False)
    sampler._wait_seconds = 0.0
    for _ in range(3):
        assert sampler.latest() == [reading(1)]  # the last one, while the driver does not answer
    assert begun.acquire(timeout=60)
    assert not begun.acquire(blocking=False)  # it was asked once
    now[0] += KEEP_SECONDS + 1
    assert sampler.latest() == []
    sampler._wait_seconds = 60.0
    answers.put(reading(2))
    answers.put(reading(3))
    assert sampler.latest() in ([reading(2)], [reading(3)])  # of the call that was made, or of the next one
