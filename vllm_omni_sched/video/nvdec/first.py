"""Properties of a video's first frame, decoded on the CPU: NVDEC returns samples without their meaning."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_omni_sched.video.facts import PacketFlag
from vllm_omni_sched.video.nvdec.colour import Colours

if TYPE_CHECKING:
    from vllm_omni_sched.video.facts import VideoIndex

_FULL_RANGE = 2  # AVCOL_RANGE_JPEG


class First(NamedTuple):
    """Properties of the first frame: FFmpeg's name of the pixel format, colours, and whether it consists of fields."""

    pixel_format: str
    colours: Colours
    interlaced: bool = False


def first_frame(index: VideoIndex, packets: memoryview) -> First | None:
    """Decode the first packet that is a start, by FFmpeg; return None if that gives no frame.

    Without PyAV, the index's pixel format is returned, with an unspecified matrix.
    """
    if not find_spec("av"):
        return First(index.pixel_format, Colours(2, index.pixel_format.startswith("yuvj")))
    import av

    starts = np.flatnonzero(index.packets["flags"] & PacketFlag.START)
    if not len(starts):
        return None
    row = index.packets[starts[0]]
    at = int(row["offset"])
    try:
        context: Any = av.CodecContext.create(index.decoder or index.codec, "r")
        context.extradata = index.extradata or None
        context.thread_count = 1
        frames = [*context.decode(av.Packet(bytes(packets[at : at + int(row["nbytes"])]))), *context.decode(None)]
    except (av.FFmpegError, ValueError):
        return None
    for frame in frames:
        full = frame.color_range == _FULL_RANGE or frame.format.name.startswith("yuvj")
        return First(frame.format.name, Colours(int(frame.colorspace), full), frame.interlaced_frame)
    return None
