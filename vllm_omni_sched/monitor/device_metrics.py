"""Publish the utilisation and memory of devices on ``/metrics``: the registry of these metrics, and the collector.

Names get the prefix of `monitor.metrics`; base units, and ratios from 0 to 1. A value that a device does not tell has
no sample.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm_omni_sched.monitor.exposition import add_value, empty_family
from vllm_omni_sched.monitor.metrics import PREFIX

DEVICE_LABELS = ("device", "uuid")


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """State of one device. None: the device does not tell this value."""

    index: int
    uuid: str
    name: str
    utilization: float | None = None  # ratios from 0 to 1
    decoder_utilization: float | None = None
    encoder_utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None

    @property
    def answers(self) -> bool:
        """Return whether the device tells any of its values."""
        return any(getattr(self, metric.field) is not None for metric in DEVICE_METRICS)


@dataclass(frozen=True)
class DeviceMetric:
    """One gauge. ``field``: the attribute of `DeviceReading`."""

    name: str
    help: str
    field: str

    @property
    def full_name(self) -> str:
        """Return the name as it appears on /metrics."""
        return PREFIX + self.name


DEVICE_METRICS = (
    DeviceMetric(
        "device_utilization_ratio",
        "Fraction of the last sample period of the driver in which the device ran a kernel.",
        "utilization",
    ),
    DeviceMetric("device_memory_used_bytes", "Device memory in use, of all processes.", "memory_used_bytes"),
    DeviceMetric("device_memory_total_bytes", "Device memory that is installed.", "memory_total_bytes"),
    DeviceMetric(
        "device_decoder_utilization_ratio",
        "Fraction of the last sample period in which the video decoder (NVDEC) was busy.",
        "decoder_utilization",
    ),
    DeviceMetric(
        "device_encoder_utilization_ratio",
        "Fraction of the last sample period in which the video encoder (NVENC) was busy.",
        "encoder_utilization",
    ),
)


class DeviceCollector(Collector):
    """Collects the metrics of the devices that ``read`` returns at each scrape; no family if there are none."""

    def __init__(self, read: Callable[[], Iterable[DeviceReading]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Family]:
        """Return nothing: registering must not look for devices."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield the families of which at least one device has a value."""
        readings = list(self._read())
        for metric in DEVICE_METRICS:
            family: Any = empty_family("gauge", metric.full_name, metric.help, DEVICE_LABELS)
            for one in readings:
                value = getattr(one, metric.field)
                if value is not None:
                    add_value(family, [str(one.index), one.uuid], value)
            if family.samples:
                yield family
