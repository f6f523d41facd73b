"""From packets to what is known of a video: which order its frames have, and why. Pure."""

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
    """The pts of all frames that are shown, in display order: frame n of the video is the n-th."""
    return np.sort(index.packets["pts"][index.packets["flags"] & PacketFlag.HIDDEN == 0])


def shown_frames(index: VideoIndex) -> int:
    """How many frames the video has, if all its packets can be decoded."""
    return int(np.count_nonzero(index.packets["flags"] & PacketFlag.HIDDEN == 0))


def flags(facts: Sequence[PacketFacts], hidden: Sequence[bool]) -> npt.NDArray[np.int32]:
    """`PacketFlag` of each packet."""
    top = max((fact.layer for fact in facts), default=0)
    start = np.array([fact.start for fact in facts], np.int32)
    # while it is unknown when a frame is shown, all are decoded, so that the order in which they come out tells
    droppable = np.array(
        [fact.droppable and fact.layer == top and fact.display is not None for fact in facts], np.int32
    )
    return (
        start * int(PacketFlag.START)
        + np.array(hidden, np.int32) * int(PacketFlag.HIDDEN)
        + droppable * int(PacketFlag.DROPPABLE)
    )


def display_ranks(facts: Sequence[PacketFacts]) -> npt.NDArray[np.int64]:
    """`PacketFacts.display` of each packet, `NO_TIME` where it is unknown."""
    return np.array([NO_TIME if fact.display is None else fact.display for fact in facts], np.int64)


def order_of(
    packets: npt.NDArray[np.void], *, known: bool, irregular: bool, display: npt.NDArray[np.int64] | None = None
) -> tuple[Order, SequenceReason | None]:
    """How frames are numbered.

    Args:
        packets: array of `PACKET`, in decode order.
        known: the codec is one whose packets we can read.
        irregular: some packet holds not exactly one frame, or changes parameters.
        display: rank of each packet's frame in the order of the codec, see `display_ranks`; None for all unknown.

    Returns:
        (order, why frames can only be had in sequence, or only from the first packet on)
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
    """Whether frames come out of a decoder in another order than that of their pts.

    Pts turn back at a start where another edit begins, or where times are damaged. That does no harm as long as what
    is shown before it has a lower pts than all that is shown from there on.
    """
    pts, shown = packets["pts"], packets["flags"] & PacketFlag.HIDDEN == 0
    starts = np.flatnonzero(packets["flags"] & PacketFlag.START)
    back = starts[pts[starts] < np.maximum.accumulate(pts)[starts]]  # never the first packet
    limits = np.iinfo(np.int64)
    before = np.maximum.accumulate(np.where(shown, pts, limits.min))
    after = np.minimum.accumulate(np.where(shown, pts, limits.max)[::-1])[::-1]
    return bool((before[back - 1] > after[back]).any())


def _contradicted(packets: npt.NDArray[np.void], display: npt.NDArray[np.int64]) -> bool:
    """Whether a decoder puts frames out in another order than that of their pts, as far as ranks are known."""
    known = (packets["flags"] & PacketFlag.HIDDEN == 0) & (display != NO_TIME)
    pts = packets["pts"][known][np.argsort(display[known], kind="stable")]
    return bool((np.diff(pts) < 0).any())


class PtsOrder:
    """Whether frames come out of a decoder in the order of their pts, as their numbers are taken from it.

    Args:
        begin: pts of the packet at which decoding begins; frames with a lower one belong to nobody, and may come in
            any order.
    """

    def __init__(self, begin: int = NO_TIME) -> None:
        self._begin = self._last = begin
        self.broken = False

    def see(self, pts: int | None) -> None:
        """Note the next frame that is shown."""
        if pts is None or self._begin <= pts < self._last:
            self.broken = True
        else:
            self._last = max(pts, self._last)


def reorder_depth(packets: npt.NDArray[np.void]) -> int:
    """How many frames are decoded, at most, before one that is shown before them; no more than decoders hold back."""
    place = np.argsort(np.argsort(packets["pts"], kind="stable"), kind="stable")
    before = np.arange(len(place))  # packets decoded before this one; of them, `place` at most are shown before it
    later = before - place  # so at least so many of them are shown after it
    return int(min(max(later.max(initial=0), 0), _MOST_HELD_BACK))
