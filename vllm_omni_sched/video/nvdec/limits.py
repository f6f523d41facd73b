"""What a card can decode, and whether a video is that. Pure: what the library says of itself in, a reason out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_omni_sched.video.facts import VideoIndex


class Refusal(str, Enum):
    """Why a video, or all of them, are not decoded by NVDEC."""

    NO_LIBRARY = "no_library"  # PyNvVideoCodec or torch is not installed
    NO_DRIVER = "no_driver"  # no driver, or one that does not let us at its video part
    NO_DEVICE = "no_device"  # no such GPU
    CODEC = "codec"  # not one that this GPU decodes to the bit
    FORMAT = "format"  # of pixels: its conversion would not be the CPU's
    CHANGES = "changes"  # its parameters change within the stream
    INTERLACED = "interlaced"  # the card would deinterlace
    SIZE = "size"  # too small or too large for this GPU
    BUSY = "busy"  # no memory left for another session
    FAILED = "failed"  # the library gave up
    INCOMPLETE = "incomplete"  # frames that packets promised did not come out


EXACT = {"h264": "H264", "hevc": "HEVC", "vp9": "VP9", "av1": "AV1"}
"""Our codecs by the library's names. Those of MPEG-4 part 2 and before leave the inverse transform to the decoder."""


class PixelFormat(NamedTuple):
    """By the library's name of chroma."""

    chroma: str
    bits: int


FORMATS = {"yuv420p": PixelFormat("420", 8), "yuvj420p": PixelFormat("420", 8)}
"""FFmpeg's names of the pixels that `colour` converts as swscale does."""


@dataclass(frozen=True)
class Limits:
    """What one GPU says of one codec and pixel format.

    Attributes:
        engines: NVDEC engines that decode it.
        macroblocks: of 16 by 16 pixels, in one frame, at most.
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
        """Of what ``GetDecoderCaps`` returns; whatever is missing there counts as 0."""
        return cls(
            supported=bool(caps.get("supported", 0)),
            engines=caps.get("num_decoder_engines", 0),
            min_width=caps.get("width_min", 0),
            min_height=caps.get("height_min", 0),
            max_width=caps.get("width_max", 0),
            max_height=caps.get("height_max", 0),
            macroblocks=caps.get("mb_num_max", 0),
        )


def out_of_reach(index: VideoIndex) -> Refusal | None:
    """Whether no card at all would do, by what the index says."""
    if index.codec not in EXACT:
        return Refusal.CODEC
    if index.pixel_format not in FORMATS or index.width % 2 or index.height % 2:
        return Refusal.FORMAT  # with an odd size swscale takes another way to RGB
    return Refusal.CHANGES if index.extradata_changes else None


def beyond(index: VideoIndex, limits: Limits) -> Refusal | None:
    """Whether this card would not do."""
    if not limits.supported:
        return Refusal.CODEC
    fits = limits.min_width <= index.width <= limits.max_width
    fits = fits and limits.min_height <= index.height <= limits.max_height
    if not fits or -(-index.width // 16) * -(-index.height // 16) > limits.macroblocks:
        return Refusal.SIZE
    return None
