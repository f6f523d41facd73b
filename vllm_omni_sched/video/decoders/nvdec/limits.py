"""Limits of a GPU's decoders, and the check of a video against them. Pure: the library's answers in, a reason out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_omni_sched.video.facts import VideoIndex


class Refusal(str, Enum):
    """Reason why NVDEC does not decode a video, or any video."""

    NO_LIBRARY = "no_library"  # PyNvVideoCodec or torch is not installed
    NO_DRIVER = "no_driver"  # no driver, or one without access to its video part
    NO_DEVICE = "no_device"  # no such GPU
    CODEC = "codec"  # this GPU does not decode it, or not exactly to the bit
    FORMAT = "format"  # pixel format whose conversion would differ from the CPU's
    CHANGES = "changes"  # its parameters change within the stream
    INTERLACED = "interlaced"  # the card would deinterlace
    SIZE = "size"  # too small or too large for this GPU
    BUSY = "busy"  # no memory left for another session
    FAILED = "failed"  # the library failed
    INCOMPLETE = "incomplete"  # wanted frames are missing


EXACT = {"h264": "H264", "hevc": "HEVC", "vp9": "VP9", "av1": "AV1"}
"""FFmpeg's names of the supported codecs -> the library's. MPEG-4 part 2 and older ones do not define the inverse
transform exactly."""


class PixelFormat(NamedTuple):
    """A pixel format: the library's name of the chroma format, and the bits per sample."""

    chroma: str
    bits: int


FORMATS = {"yuv420p": PixelFormat("420", 8), "yuvj420p": PixelFormat("420", 8)}
"""FFmpeg's names of the pixel formats that `colour` converts as swscale does."""


@dataclass(frozen=True)
class Limits:
    """A GPU's limits for one codec and pixel format.

    Attributes:
        engines: number of NVDEC engines that decode it.
        macroblocks: most macroblocks of 16 by 16 pixels in a frame.
    """

    supported: bool
    engines: int
    min_width: int
    min_height: int
    max_width: int
    max_height: int
    macroblocks: int

    @classmethod
    def of(cls, caps: Mapping[str, int]) -> Limits:
        """Convert the result of ``GetDecoderCaps``; missing keys count as 0."""
        return cls(
            supported=bool(caps.get("supported", 0)),
            engines=caps.get("num_decoder_engines", 0),
            min_width=caps.get("width_min", 0),
            min_height=caps.get("height_min", 0),
            max_width=caps.get("width_max", 0),
            max_height=caps.get("height_max", 0),
            macroblocks=caps.get("mb_num_max", 0),
        )


def refusal_by_index(index: VideoIndex) -> Refusal | None:
    """Return why no GPU can decode this video, judged by its index; None if one may."""
    if index.codec not in EXACT:
        return Refusal.CODEC
    if index.pixel_format not in FORMATS or index.width % 2 or index.height % 2:
        return Refusal.FORMAT  # swscale converts odd sizes by other code
    return Refusal.CHANGES if index.extradata_changes else None


def refusal_by_limits(index: VideoIndex, limits: Limits) -> Refusal | None:
    """Return why this GPU cannot decode this video; None if it can."""
    if not limits.supported:
        return Refusal.CODEC
    fits = limits.min_width <= index.width <= limits.max_width
    fits = fits and limits.min_height <= index.height <= limits.max_height
    if not fits or -(-index.width // 16) * -(-index.height // 16) > limits.macroblocks:
        return Refusal.SIZE
    return None
