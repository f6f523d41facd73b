"""The choice of the frames that `decode` decodes, and facts on a video's structure. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from vllm_omni_sched.video.facts import Order, PacketFlag
from vllm_omni_sched.video.frame_order import shown_frames, shown_pts

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_omni_sched.video.facts import VideoIndex

FrameChoice = Callable[["VideoIndex"], list[int]]
"""Returns the numbers of the frames to decode, in display order."""


def all_frames(index: VideoIndex) -> list[int]:
    """Choose every frame."""
    return list(range(shown_frames(index)))


def uniform(count: int) -> FrameChoice:
    """Choose ``count`` frames, evenly spaced from the first to the last, as vLLM samples by number of frames."""

    def choose(index: VideoIndex) -> list[int]:
        total = shown_frames(index)
        if count >= total:
            return all_frames(index)
        return [int(n) for n in np.linspace(0, total - 1, count, dtype=int)]

    return choose


def per_second(fps: float) -> FrameChoice:
    """Choose the frame that is shown at each tick of 1 / fps seconds from the first frame; none twice."""

    def choose(index: VideoIndex) -> list[int]:
        times = frame_times(index)
        if not len(times):
            return []
        ticks = np.arange(int(np.floor(times[-1] * fps + 1e-6)) + 1) / fps
        shown = np.searchsorted(times, ticks + 1e-6, side="right") - 1
        return [int(n) for n in np.unique(shown)]

    return choose


def frame_times(index: VideoIndex) -> npt.NDArray[np.float64]:
    """Return when each frame is shown, in seconds from the first; without pts, by its number and the mean rate."""
    if index.order is Order.PTS:
        numerator, denominator = index.time_base
        pts = shown_pts(index)
        return (pts - (pts[0] if len(pts) else 0)) * (numerator / denominator)
    return np.arange(shown_frames(index)) / (index.fps or 25.0)


def gop_starts(index: VideoIndex) -> list[int]:
    """Return the numbers of the frames where decoding may begin; empty if frames are only counted."""
    if index.order is not Order.PTS:
        return []
    starts = index.packets[(index.packets["flags"] & PacketFlag.START) > 0]
    return sorted(int(n) for n in np.searchsorted(shown_pts(index), np.sort(starts["pts"])))
