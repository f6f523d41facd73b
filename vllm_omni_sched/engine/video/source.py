"""The description of a video that vLLM's sampling rules get: what OpenCV would report, from the index alone.

Source: OpenCV's ``cap_ffmpeg_impl.hpp`` (``get_total_frames``, ``get_fps``, ``seek``) and vLLM's
``OpenCVVideoBackendMixin.get_video_metadata``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_omni_sched.video.facts import Order, PacketFlag, SequenceReason
from vllm_omni_sched.video.frame_order import shown_frames, shown_pts

if TYPE_CHECKING:
    from vllm_omni_sched.video.facts import VideoIndex

NOTHING = 0.000025  # OpenCV's `eps_zero`: a rate or a duration below it counts as absent
_MOST_OVERSTATED = 2
"""Largest ratio of a frame count from duration times rate to the number of packets. A higher count is not used, as most
of the frames that a rule would name do not exist."""

SEEK_BACK = 16  # frames that OpenCV goes back from its target, at first


@dataclass(frozen=True)
class Source:
    """A video as sampling rules see it, like vLLM's ``VideoSourceMetadata``.

    ``total_frames`` is the container's count, as with OpenCV; damaged files have fewer.
    ``fps``: frames per second, 0.0 when unknown.
    """

    total_frames: int
    fps: float
    duration_seconds: float


def source_of(index: VideoIndex, *, cross_check: bool = True) -> Source:
    """Return the video as vLLM's default loader describes it to a sampling rule.

    Args:
        index: of the video.
        cross_check: whether this vLLM looks for an edit list that hides frames which the header counts (0.30 on).
    """
    fps = frame_rate(index)
    shown = shown_frames(index)
    total = index.header_frames or math.floor(_duration(index) * fps + 0.5)
    if total <= 0 or (not index.header_frames and total > _MOST_OVERSTATED * shown):
        # Streamed and raw video: vLLM counts packets from 0.33 on, and found one frame before. Audio with a cover
        # picture, which lasts as long as the audio at one frame per unit of time: vLLM finds one frame, too.
        total = shown
    elif cross_check:
        visible = visible_frames(index, total, fps)
        if visible is not None and 0 < visible < total - 1:
            total = visible
    return Source(total, fps, total / fps if fps > 0 else 0.0)


def frame_size(index: VideoIndex) -> tuple[int, int]:
    """Return width and height of the decoded frames in pixels, after rotation."""
    turned = index.rotation in (90, 270)
    return (index.height, index.width) if turned else (index.width, index.height)


def frame_rate(index: VideoIndex) -> float:
    """Return the frames per second; without a known rate, one frame per unit of time, as OpenCV does."""
    numerator, denominator = index.time_base
    rates = (index.mean_fps, index.fps, denominator / numerator if numerator else 0.0)
    return next((rate for rate in rates if rate >= NOTHING), 0.0)


def _duration(index: VideoIndex) -> float:
    return index.duration_seconds if index.duration_seconds >= NOTHING else index.stream_duration_seconds


def _stream_duration(index: VideoIndex) -> float:
    return index.stream_duration_seconds or index.duration_seconds


def visible_frames(index: VideoIndex, total: int, fps: float) -> int | None:
    """Return the frame count that OpenCV finds by a seek to the end, if the stream really ends there; else None.

    OpenCV seeks to a start before the target, takes that frame's number from its pts, and counts frames from there. The
    number is right if the rate is constant; vLLM uses the result in any case, so the same is computed here.
    """
    seconds = index.time_base[0] / index.time_base[1] if index.time_base[1] else 0.0
    if fps < NOTHING or seconds <= 0:
        return None
    packets = index.packets
    is_start = packets["flags"] & PacketFlag.START != 0
    is_shown = packets["flags"] & PacketFlag.HIDDEN == 0
    pts = shown_pts(index)
    if index.order is not Order.PTS:
        if index.why_sequence is SequenceReason.NO_START and is_start.any():
            pts = pts[pts >= packets["pts"][is_start].min()]  # frames before the first start cannot be decoded
        else:
            return shown_frames(index)  # pts are no numbers: frames that several edits show may share one
    if not len(pts):
        return None
    length = (int(pts[-1]) - int(pts[0])) * seconds
    if len(packets) < index.header_frames and length + 2 / fps < _stream_duration(index):
        # The file is truncated. Where OpenCV's seek leads beyond its end, vLLM samples frames that do not exist.
        return shown_frames(index)

    starts = np.sort(packets["pts"][is_start & is_shown])
    back = SEEK_BACK
    while True:
        at = max(total - back, 0)
        target = int(pts[0]) + int(at / fps / seconds + 0.5)
        before = starts[starts <= target]
        first = int(np.searchsorted(pts, before[-1])) if len(before) else 0
        number = int(fps * (int(pts[first]) - int(pts[0])) * seconds + 0.5)
        if number <= total - 1 or at == 0:
            break
        back = back * 3 // 2
    last = number + len(pts) - 1 - first
    return last + 1 if last <= total - 1 else None
