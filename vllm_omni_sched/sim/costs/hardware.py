"""List devices with their published speeds, and cost the decoding of frames on a core or a video engine."""

from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import DecoderCosts, Source, SourceKind, pick
from vllm_omni_sched.sim.scenario.stages import VideoStage
from vllm_omni_sched.sim.work import Clip


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


DEVICES = {
    kind.name: kind
    for kind in (
        # NVIDIA A100 data sheet and Ampere architecture white paper, SXM4 40 GB
        DeviceKind("a100-40gb", 40 * 10**9, 1555e9, 312e12, 5, NvdecGeneration.TURING, 1290e6, 300e9, 32e9),
        # NVIDIA A100 data sheet and Ampere architecture white paper, SXM4 80 GB
        DeviceKind("a100-80gb", 80 * 10**9, 2039e9, 312e12, 5, NvdecGeneration.TURING, 1290e6, 300e9, 32e9),
        # NVIDIA H100 data sheet and Hopper architecture white paper, SXM5
        DeviceKind("h100-80gb", 80 * 10**9, 3350e9, 989e12, 7, NvdecGeneration.TURING, 1545e6, 450e9, 64e9),
        # NVIDIA H200 data sheet, SXM; the chip is the H100's
        DeviceKind("h200-141gb", 141 * 10**9, 4800e9, 989e12, 7, NvdecGeneration.TURING, 1545e6, 450e9, 64e9),
        # NVIDIA Blackwell data sheet; peaks are half of those with sparsity
        DeviceKind("b200-180gb", 180 * 10**9, 7700e9, 2250e12, 0, NvdecGeneration.ADA, 0.0, 900e9, 64e9),
        # NVIDIA L40S data sheet
        DeviceKind("l40s", 48 * 10**9, 864e9, 362.05e12, 3, NvdecGeneration.ADA, 2160e6, 0.0, 32e9),
        # NVIDIA RTX A6000 data sheet; its tensor peak is with sparsity, this is half of it
        DeviceKind("a6000", 48 * 10**9, 768e9, 154.8e12, 2, NvdecGeneration.AMPERE, 1665e6, 56.25e9, 32e9),
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


_FULL_HD = 1920 * 1080

# Seconds for a pixel, by codec. The clips of `benchmarks/video`, 1280 x 720, on a quiet core of an AMD EPYC: all 1,800
# frames of h264 in 3.71 s; the 973 of h264 and of hevc that 32 wanted ones need in 1.65 and 2.51 s, the 704 of av1
# that they need in 1.18 s.
_H264 = 3.71 / 1800 / (1280 * 720)
CORE_PIXEL_SECONDS = {"h264": _H264, "hevc": _H264 * 2.51 / 1.65, "av1": _H264 * (1.18 / 704) / (1.65 / 973)}

# Frames of 1920 x 1080 per second of one engine, at the video clock behind them.
NVDEC_FRAMES = {
    NvdecGeneration.TURING: ({"h264": 771.0, "hevc": 1316.0, "vp9": 932.0}, 1860e6),
    NvdecGeneration.AMPERE: ({"h264": 748.0, "hevc": 1415.0, "vp9": 1075.0, "av1": 790.0}, 1665e6),
    NvdecGeneration.ADA: ({"h264": 903.0, "hevc": 1641.0, "vp9": 1290.0, "av1": 1018.0}, 2160e6),
}
NVDEC_SOURCE = "NVDEC application note of NVIDIA Video Codec SDK 13.0, table of section 3, scaled by the video clock"


class CoreDecoder:
    """Models FFmpeg on one core; seconds are in proportion to pixels, and those of about 2 Mbit/s of 1280 x 720.

    At 8 Mbit/s they were 2.4 times as many, and with other work on the machine 1.8 to 4 times.
    """

    source = Source(SourceKind.MEASURED, "benchmarks/video, clips of 1280 x 720 on a core of an AMD EPYC, PyAV")
    piece_seconds = 0.003
    """To open the file again and to seek: assumed, a tenth of the first opening (0.01 to 0.08 s were measured)."""

    def frames_seconds(self, clip: Clip, frames: int) -> float:
        pixel = CORE_PIXEL_SECONDS.get(clip.codec)
        if pixel is None:
            known = ", ".join(sorted(CORE_PIXEL_SECONDS))
            raise ConfigError(f"decoding on a core was measured for {known}, not for {clip.codec!r}: use one of these")
        return frames * clip.width * clip.height * pixel


class NvdecDecoder:
    """Models one NVDEC engine; seconds are in proportion to pixels, by codec and generation.

    Raises:
        ConfigError: no speed of the device's video engines is known.
    """

    piece_seconds = 1e-3
    """To hand a piece to an initialised decoder: assumed."""

    def __init__(self, device: DeviceKind) -> None:
        if not device.nvdec_engines:
            raise ConfigError(f"no speed of the video engines of {device.name!r} is published: set decoders = 'cpu'")
        frames, hertz = NVDEC_FRAMES[device.nvdec]
        faster = device.video_hertz / hertz
        self.device = device
        self.source = Source(SourceKind.PUBLISHED, NVDEC_SOURCE)
        self._pixel_seconds = {codec: 1 / (rate * faster * _FULL_HD) for codec, rate in frames.items()}

    def frames_seconds(self, clip: Clip, frames: int) -> float:
        pixel = self._pixel_seconds.get(clip.codec)
        if pixel is None:
            known = ", ".join(sorted(self._pixel_seconds))
            raise ConfigError(
                f"the video engines of {self.device.name!r} decode {known}, not {clip.codec!r}: set decoders = 'cpu'"
            )
        return frames * clip.width * clip.height * pixel


class GivenDecoder:
    """A decoder with the speed that the scenario sets."""

    source = Source(SourceKind.ASSUMED, "the scenario's megapixels_per_second")

    def __init__(self, megapixels_per_second: float, piece_seconds: float) -> None:
        self._pixel_seconds = 1e-6 / megapixels_per_second
        self.piece_seconds = piece_seconds

    def frames_seconds(self, clip: Clip, frames: int) -> float:
        """Return seconds in proportion to the pixels."""
        return frames * clip.width * clip.height * self._pixel_seconds


def decoder_of(stage: VideoStage, device_name: str) -> DecoderCosts:
    """Return the costs of one decoder.

    Raises:
        ConfigError: there is no such device, or it has no such decoders; the message names the stage.
    """
    try:
        own = CoreDecoder() if stage.decoders == "cpu" else NvdecDecoder(device(device_name))
    except ConfigError as error:
        raise ConfigError(f"stage {stage.name!r}: {error}") from None
    if stage.megapixels_per_second is None:
        return own
    piece = own.piece_seconds if stage.piece_seconds is None else stage.piece_seconds
    return GivenDecoder(stage.megapixels_per_second, piece)
