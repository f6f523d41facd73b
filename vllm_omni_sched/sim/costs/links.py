"""Model the time to move bytes between devices and machines."""

from dataclasses import dataclass

from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.costs.registry import pick


@dataclass(frozen=True)
class Link:
    """One direction of a connection.

    ``source`` is the source of the bandwidth, ``latency_source`` that of the time to the first byte.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float
    source: Source
    latency_source: Source

    def seconds(self, size: int) -> float:
        """Return the seconds for so many bytes, alone on the link."""
        return self.latency_seconds + size / self.bytes_per_second


def _published(text: str) -> Source:
    return Source(SourceKind.PUBLISHED, text)


def _assumed(text: str) -> Source:
    return Source(SourceKind.ASSUMED, text)


_PEER = _assumed("a copy between GPUs of a node is a launch and a handshake: 10 us")
_HOST = _assumed("a copy through host memory is two launches: 20 us")
_NETWORK = _assumed("a message over RDMA with its bookkeeping: 30 us; over TCP it is more")

LINKS = {
    link.name: link
    for link in (
        Link("nvlink-3", 300e9, 10e-6, _published("NVIDIA A100 data sheet: 600 GB/s, both directions"), _PEER),
        Link("nvlink-4", 450e9, 10e-6, _published("NVIDIA H100 data sheet: 900 GB/s, both directions"), _PEER),
        Link("pcie-4", 32e9, 20e-6, _published("PCI Express 4.0 x16: 64 GB/s, both directions"), _HOST),
        Link("pcie-5", 64e9, 20e-6, _published("PCI Express 5.0 x16: 128 GB/s, both directions"), _HOST),
        Link("ethernet-100g", 12.5e9, 30e-6, _published("IEEE 802.3, 100 Gbit/s"), _NETWORK),
        Link("ethernet-400g", 50e9, 30e-6, _published("IEEE 802.3, 400 Gbit/s"), _NETWORK),
    )
}


def all_reduce_factor(devices: int) -> float:
    """Return how often each device sends the bytes of a ring all-reduce (Patarasuk and Yuan, JPDC 2009)."""
    return 2 * (devices - 1) / devices


def link(name: str) -> Link:
    """Return the link of that name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    return pick("link", name, LINKS)
