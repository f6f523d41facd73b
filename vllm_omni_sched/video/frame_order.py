"""The order and the times of a video's frames, derived from its packets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_omni_sched.video.facts import NO_TIME, Order, PacketFlag, SequenceReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vllm_omni_sched.video.bitstream import PacketFacts
    from vllm_omni_sched.video.facts import VideoIndex

_MOST_HELD_BACK = 16


def shown_pts(index: VideoIndex) -> npt.NDArray[np.int64]:
    """Return the pts of all shown frames in display order: frame n of the video has the n-th."""
    return np.sort(index.packets["pts"][index.packets["flags"] & PacketFlag.HIDDEN == 0])


def shown_frames(index: VideoIndex) -> int:
    """Return the number of frames of the video, if all its packets can be decoded."""
    return index.frames or int(np.count_nonzero(index.packets["flags"] & PacketFlag.HIDDEN == 0))


def pts_seconds(index: VideoIndex, frames: Sequence[int]) -> list[float]:
    """Return when frames are shown, in seconds from the first frame; without pts, by the mean rate."""
    if index.order is Order.SEQUENCE:
        rate = index.fps or 1.0
        return [frame / rate for frame in frames]
    pts = shown_pts(index)
    numerator, denominator = index.time_base
    return [(int(pts[frame]) - int(pts[0])) * numerator / denominator for frame in frames]


def packet_flags(facts: Sequence[PacketFacts], hidden: Sequence[bool]) -> npt.NDArray[np.int32]:
    """Return the `PacketFlag` of each packet."""
    top = max((fact.layer for fact in facts), default=0)
    start = np.array([fact.start for fact in facts], np.int32)
    # if it is unknown when a frame is shown, all are decoded, so that their output order tells
    droppable = np.array(
        [fact.droppable and fact.layer == top and fact.display is not None for fact in facts], np.int32
    )
    return (
        start * int(PacketFlag.START)
        + np.array(hidden, np.int32) * int(PacketFlag.HIDDEN)
        + droppable * int(PacketFlag.DROPPABLE)
    )


def display_ranks(facts: Sequence[PacketFacts]) -> npt.NDArray[np.int64]:
    """Return `PacketFacts.display` of each packet, and `NO_TIME` if it is unknown."""
    return np.array([NO_TIME if fact.display is None else fact.display for fact in facts], np.int64)


def order_of(
    packets: npt.NDArray[np.void], *, known: bool, irregular: bool, display: npt.NDArray[np.int64] | None = None
) -> tuple[Order, SequenceReason | None]:
    """Return how frames are numbered.

    Args:
        packets: array of `PACKET`, in decode order.
        known: whether the packets of the codec can be read here.
        irregular: whether a packet does not hold exactly one frame, or changes parameters.
        display: rank of each packet's frame in the order of the codec, see `display_ranks`; None if unknown.

    Returns:
        The order, and why frames can be decoded only in sequence, or only from the first packet on.
    """
    if not known:
        return Order.SEQUENCE, SequenceReason.CODEC
    pts = packets["pts"]
    if (pts == NO_TIME).any() or len(np.unique(pts)) < len(pts):
        return Order.SEQUENCE, SequenceReason.NO_PTS
    if _turns_back(packets):
        return Order.SEQUENCE, SequenceReason.NO_PTS
    if irregular:
        return Order.SEQUENCE, SequenceReason.PACKETS_DIFFER
    if display is not None and _contradicted(packets, display):
        return Order.SEQUENCE, SequenceReason.DISORDER
    starts = np.flatnonzero(packets["flags"] & PacketFlag.START)
    shown = packets["flags"] & PacketFlag.HIDDEN == 0
    if not len(starts) or (shown & (pts < pts[starts[0]])).any():
        return Order.SEQUENCE, SequenceReason.NO_START  # some frames may not come out: it is unknown how many
    return Order.PTS, SequenceReason.NO_START if len(starts) == 1 < len(pts) else None


def _turns_back(packets: npt.NDArray[np.void]) -> bool:
    """Return whether pts decrease at a start so that frames are decoded in another order than that of their pts.

    Pts decrease at a start if another edit begins, or if times are damaged. That is harmless as long as all frames
    shown before it have lower pts than all frames shown from there on.
    """
    pts, shown = packets["pts"], packets["flags"] & PacketFlag.HIDDEN == 0
    starts = np.flatnonzero(packets["flags"] & PacketFlag.START)
    back = starts[pts[starts] < np.maximum.accumulate(pts)[starts]]  # never the first packet
    limits = np.iinfo(np.int64)
    before = np.maximum.accumulate(np.where(shown, pts, limits.min))
    after = np.minimum.accumulate(np.where(shown, pts, limits.max)[::-1])[::-1]
    return bool((before[back - 1] > after[back]).any())


def _contradicted(packets: npt.NDArray[np.void], display: npt.NDArray[np.int64]) -> bool:
    """Return whether a decoder outputs frames in another order than that of their pts, as far as ranks are known."""
    known = (packets["flags"] & PacketFlag.HIDDEN == 0) & (display != NO_TIME)
    pts = packets["pts"][known][np.argsort(display[known], kind="stable")]
    return bool((np.diff(pts) < 0).any())


class PtsOrder:
    """Checks that a decoder outputs frames in the order of their pts, from which their numbers are derived.

    Args:
        begin: pts of the packet at which decoding begins; frames with a lower pts are ignored, and may come in any
            order.
    """

    def __init__(self, begin: int = NO_TIME) -> None:
        self._begin = self._last = begin
        self.broken = False

    def check(self, pts: int | None) -> None:
        """Check the next shown frame."""
        if pts is None or self._begin <= pts < self._last:
            self.broken = True
        else:
            self._last = max(pts, self._last)


def reorder_depth(packets: npt.NDArray[np.void]) -> int:
    """Return the most frames decoded before a frame that is shown before them; bounded by what decoders hold back."""
    rank = np.argsort(np.argsort(packets["pts"], kind="stable"), kind="stable")
    before = np.arange(len(rank))  # packets decoded before this one; of them, `rank` at most are shown before it
    later = before - rank  # so at least so many of them are shown after it
    return int(min(max(later.max(initial=0), 0), _MOST_HELD_BACK))
