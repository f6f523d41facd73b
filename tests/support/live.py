"""Streams for live decoding, and what comes of them."""

from __future__ import annotations

import io
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import av
import numpy as np

from vllm_omni_sched.video.live import LiveFrame, LiveVideo

FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
CLOSED_GOPS = "bf=2 sc_threshold=0 flags=+cgop"
GOP = 16
PATIENCE = 20.0  # of tests that expect something to come; those that do not fail take a second


class Sent(NamedTuple):
    """Holds a stream, and the offset at which each GOP has been written completely."""

    data: bytes
    gop_ends: list[int]


@lru_cache
def stream(
    container: str = "mpegts",
    codec: str = "libx264",
    gops: int = 4,
    options: str = CLOSED_GOPS,
    width: int = 64,
    rotation: int = 0,
) -> Sent:
    """Encode moving noise, width by 48, 30 frames/s, as a camera would send it; players turn it clockwise."""
    file = io.BytesIO()
    noise = np.random.default_rng(7).integers(0, 256, (48, width + gops * GOP, 3), dtype=np.uint8)
    ends = []
    with av.open(file, "w", format=container, options=FRAGMENTED if container == "mp4" else {}) as out:
        video = out.add_stream(codec, rate=Fraction(30))
        video.width, video.height, video.pix_fmt, video.gop_size = width, 48, "yuv420p", GOP
        video.options = dict(option.split("=", 1) for option in options.split())
        if rotation:
            video.set_display_rotation(-rotation)
        packets = []
        for i in range(gops * GOP):
            packets += video.encode(av.VideoFrame.from_ndarray(noise[:, i : i + width].copy(), format="rgb24"))
        packets += video.encode()
        for packet in packets:
            if packet.is_keyframe:
                ends.append(file.tell())
            out.mux(packet)
    return Sent(file.getvalue(), [*ends[1:], len(file.getvalue())])


def plain(data: bytes) -> list[np.ndarray]:
    """Return all frames of a file before any damage, in display order."""
    with av.open(io.BytesIO(data)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def take(live: LiveVideo, count: int) -> list[LiveFrame]:
    """Take ``count`` frames and stop."""
    found = []
    for frame in live:
        found.append(frame)
        if len(found) == count:
            break
    return found


def decode(live: LiveVideo, data: bytes) -> list[LiveFrame]:
    """Feed a live video all of its bytes, and return its frames."""
    live.feed(data)
    live.end()
    return list(live)


def pixels(frames: list[LiveFrame]) -> list[np.ndarray]:
    return [frame.pixels for frame in frames]
