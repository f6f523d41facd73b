"""List devices with their published speeds."""

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
    ``nvdec_engines`` is 0 where no speed of them is published.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    flops: float
    nvdec_engines: int
    nvdec: NvdecGeneration
    video_hertz: float
    nvlink_bytes_per_second: float
    pcie_bytes_per_second: float
    source: Source


def _published(text: str) -> Source:
    return Source(SourceKind.PUBLISHED, text)


DEVICES = {
    kind.name: kind
    for kind in (
        DeviceKind(
            "a100-40gb", 40 * 10**9, 1555e9, 312e12, 5, NvdecGeneration.TURING, 1290e6, 300e9, 32e9,
            _published("NVIDIA A100 data sheet and Ampere architecture white paper, SXM4 40 GB"),
        ),
        DeviceKind(
            "a100-80gb", 80 * 10**9, 2039e9, 312e12, 5, NvdecGeneration.TURING, 1290e6, 300e9, 32e9,
            _published("NVIDIA A100 data sheet and Ampere architecture white paper, SXM4 80 GB"),
        ),
        DeviceKind(
            "h100-80gb", 80 * 10**9, 3350e9, 989e12, 7, NvdecGeneration.TURING, 1545e6, 450e9, 64e9,
            _published("NVIDIA H100 data sheet and Hopper architecture white paper, SXM5"),
        ),
        DeviceKind(
            "h200-141gb", 141 * 10**9, 4800e9, 989e12, 7, NvdecGeneration.TURING, 1545e6, 450e9, 64e9,
            _published("NVIDIA H200 data sheet, SXM; the chip is the H100's"),
        ),
        DeviceKind(
            "b200-180gb", 180 * 10**9, 7700e9, 2250e12, 0, NvdecGeneration.ADA, 0.0, 900e9, 64e9,
            _published("NVIDIA Blackwell data sheet; peaks are half of those with sparsity"),
        ),
        DeviceKind(
            "l40s", 48 * 10**9, 864e9, 362.05e12, 3, NvdecGeneration.ADA, 2160e6, 0.0, 32e9,
            _published("NVIDIA L40S data sheet"),
        ),
        DeviceKind(
            "a6000", 48 * 10**9, 768e9, 154.8e12, 2, NvdecGeneration.AMPERE, 1665e6, 56.25e9, 32e9,
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


def all_reduce_factor(devices: int) -> float:
    """Return how often each device sends the bytes of a ring all-reduce (Patarasuk and Yuan, JPDC 2009)."""
    return 2 * (devices - 1) / devices
