"""List devices and the links between them, with their published speeds."""

from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.sim.costs.base import Source, SourceKind, pick


class NvdecGeneration(str, Enum):
    """Generation of a GPU's video decoders; GA100 and Hopper have those of Turing."""

    TURING = "turing"
    AMPERE = "ampere"  # GA10x
    ADA = "ada"


@dataclass(frozen=True)
class DeviceKind:
    """A kind of GPU. The peaks are not reached in practice: `efficiency` has the fractions that work reaches.

    ``memory_bytes``: the decimal gigabytes of the data sheet, of which the driver shows a few per cent more.
    ``flops``: bf16 on tensor cores, dense, per second. ``nvlink_bytes_per_second``, ``pcie_bytes_per_second``: in one
    direction, half of the data sheet's value; 0 without NVLink. ``video_hertz``: highest clock of its video engines;
    from ``nvidia-smi -q -d CLOCK`` of such devices; of L40S and A6000 that of their generation in NVIDIA's NVDEC note.
    ``nvdec_engines`` is 0 where no speed of them is published. ``fp8_flops``: dense, per second; 0 without them.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    flops: float
    sms: int
    nvdec_engines: int
    nvdec: NvdecGeneration
    video_hertz: float
    nvlink_bytes_per_second: float
    pcie_bytes_per_second: float
    source: Source
    fp8_flops: float = 0.0


def _published(text: str) -> Source:
    return Source(SourceKind.PUBLISHED, text)


DEVICES = {
    kind.name: kind
    for kind in (
        DeviceKind(
            "a100-40gb", 40 * 10**9, 1555e9, 312e12, 108, 5, NvdecGeneration.TURING, 1290e6, 300e9, 32e9,
            _published("NVIDIA A100 data sheet and Ampere architecture white paper, SXM4 40 GB"),
        ),
        DeviceKind(
            "a100-80gb", 80 * 10**9, 2039e9, 312e12, 108, 5, NvdecGeneration.TURING, 1290e6, 300e9, 32e9,
            _published("NVIDIA A100 data sheet and Ampere architecture white paper, SXM4 80 GB"),
        ),
        DeviceKind(
            "h100-80gb", 80 * 10**9, 3350e9, 989e12, 132, 7, NvdecGeneration.TURING, 1545e6, 450e9, 64e9,
            _published("NVIDIA H100 data sheet and Hopper architecture white paper, SXM5"), 1979e12,
        ),
        DeviceKind(
            "h200-141gb", 141 * 10**9, 4800e9, 989e12, 132, 7, NvdecGeneration.TURING, 1545e6, 450e9, 64e9,
            _published("NVIDIA H200 data sheet, SXM; the chip is the H100's"), 1979e12,
        ),
        DeviceKind(
            "b200-180gb", 180 * 10**9, 7700e9, 2250e12, 148, 0, NvdecGeneration.ADA, 0.0, 900e9, 64e9,
            _published("NVIDIA Blackwell data sheet; peaks are half of those with sparsity; SMs assumed"), 4500e12,
        ),
        DeviceKind(
            "l40s", 48 * 10**9, 864e9, 362.05e12, 142, 3, NvdecGeneration.ADA, 2160e6, 0.0, 32e9,
            _published("NVIDIA L40S data sheet"), 733e12,
        ),
        DeviceKind(
            "a6000", 48 * 10**9, 768e9, 154.8e12, 84, 2, NvdecGeneration.AMPERE, 1665e6, 56.25e9, 32e9,
            _published("NVIDIA RTX A6000 data sheet; its tensor peak is with sparsity, this is half of it"),
        ),
    )
}  # fmt: skip


def device(name: str) -> DeviceKind:
    """Return the device kind of that name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    return pick("device", name, DEVICES)


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
        Link("nvlink-5", 900e9, 10e-6, _published("NVIDIA Blackwell data sheet: 1,800 GB/s, both directions"), _PEER),
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
