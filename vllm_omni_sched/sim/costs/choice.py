"""Choose the cost model that a scenario names, and cost the decoding of frames on a core or an engine of a GPU."""

from collections.abc import Callable
from pathlib import Path

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import DecoderCosts, EngineCosts, Source, SourceKind, pick
from vllm_omni_sched.sim.costs.hardware import DeviceKind, NvdecGeneration, device
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.costs.roofline import Efficiency, RooflineCosts
from vllm_omni_sched.sim.work import Clip

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
    """Models FFmpeg on one core; seconds are in proportion to pixels.

    ``slowdown``: 1 for about 2 Mbit/s of 1280 x 720; at 8 Mbit/s it was 2.4, and with other work on the machine
    1.8 to 4. ``open_seconds``: to read the index of a file's frames once; 0.01 to 0.08 were measured.
    """

    source = Source(SourceKind.MEASURED, "benchmarks/video, clips of 1280 x 720 on a core of an AMD EPYC, PyAV")
    open_seconds = 0.03

    def __init__(self, slowdown: float = 1.0) -> None:
        if not slowdown > 0:
            raise ConfigError(f"slowdown of a core must be above 0, got {slowdown}")
        self.slowdown = slowdown

    def frames_seconds(self, clip: Clip, frames: int) -> float:
        pixel = CORE_PIXEL_SECONDS.get(clip.codec)
        if pixel is None:
            known = ", ".join(sorted(CORE_PIXEL_SECONDS))
            raise ConfigError(f"decoding on a core was measured for {known}, not for {clip.codec!r}: use one of these")
        return frames * clip.width * clip.height * pixel * self.slowdown

    @property
    def piece_seconds(self) -> float:
        """Return the seconds to open the file again and to seek: assumed, a tenth of the first opening."""
        return self.open_seconds / 10


class NvdecDecoder:
    """Models one NVDEC engine; seconds are in proportion to pixels, by codec and generation.

    ``open_seconds``: to read the index of frames, on a core, as for `CoreDecoder`.

    Raises:
        ConfigError: no speed of the device's video engines is known.
    """

    open_seconds = CoreDecoder.open_seconds

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

    @property
    def piece_seconds(self) -> float:
        """Return the seconds to hand a piece to an initialised decoder: assumed."""
        return 1e-3


def engine_costs(
    stage: str,
    device_name: str,
    model_name: str | None = None,
    calibration: Path | None = None,
    devices: int = 1,
    efficiency: Efficiency | None = None,
) -> EngineCosts:
    """Return the costs of an engine: measured if there is a calibration, else by its roofline.

    Raises:
        ConfigError: neither or both of ``model_name`` and ``calibration`` are given, a name is unknown, the file is no
            calibration, or the model does not fit; the message names the stage.
    """
    if (model_name is None) == (calibration is None):
        raise ConfigError(f"stage {stage!r}: give it either 'model' or 'calibration'")
    try:
        if calibration is not None:
            return MeasuredCosts.read(calibration)
        return RooflineCosts(model(model_name or ""), device(device_name), devices, efficiency)
    except ConfigError as error:
        raise ConfigError(f"stage {stage!r}: {error}") from None


def decoder_costs(stage: str, decoders: str, device_name: str) -> DecoderCosts:
    """Return the costs of one decoder: a core for ``cpu``, an engine of the device for ``nvdec``.

    Raises:
        ConfigError: a name is unknown; the message names the stage.
    """
    try:
        known: dict[str, Callable[[], DecoderCosts]] = {
            "cpu": CoreDecoder,
            "nvdec": lambda: NvdecDecoder(device(device_name)),
        }
        return pick("decoders", decoders, known)()
    except ConfigError as error:
        raise ConfigError(f"stage {stage!r}: {error}") from None
