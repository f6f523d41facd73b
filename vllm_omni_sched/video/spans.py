"""Which packets frames need. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_omni_sched.video.facts import NO_TIME, PacketFlag, Wanted
from vllm_omni_sched.video.index import shown_pts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vllm_omni_sched.video.facts import VideoIndex


class Span(NamedTuple):
    """Wanted frames, and a run of packets from which they can be decoded.

    Attributes:
        first: index of the packet where decoding begins.
        last: index of the last packet that is needed.
        wanted: the frames, by display order.
    """

    first: int
    last: int
    wanted: tuple[Wanted, ...]


def spans(index: VideoIndex, numbers: Sequence[int]) -> tuple[list[Span], tuple[int, ...]]:
    """Cut a video whose frames are known by pts where decoding can begin.

    1. Frame n is the one with the n-th pts of those that are shown.
    2. It is decoded from the last start whose own pts is not behind its pts; before the first start, from the
       first packet.
    3. Packets are needed up to its own, in file order. With an open GOP that is past the next start: frames that
       are shown before a start may come after it in the file.

    Args:
        index: of the video, in `Order.PTS`.
        numbers: wanted frames, ascending, each once; the n-th goes to slot n.

    Returns:
        (spans by display order, slots of frames that the video does not have)
    """
    packets = index.packets
    shown = shown_pts(index)
    wanted = np.asarray(numbers, np.int64)
    there = wanted[wanted < len(shown)]
    pts = shown[there]
    by_pts = np.argsort(packets["pts"])
    own = by_pts[np.searchsorted(packets["pts"], pts, sorter=by_pts)]
    starts = np.flatnonzero(packets["flags"] & PacketFlag.START)
    # a start that is shown before one ahead of it in the file would hide that one: such a start is none
    starts = starts[packets["pts"][starts] == np.maximum.accumulate(packets["pts"][starts])]
    place = np.searchsorted(packets["pts"][starts], pts, side="right") - 1
    first = np.where(place >= 0, starts[np.maximum(place, 0)], 0) if len(starts) else np.zeros_like(place)
    found: list[Span] = []
    for slot, (number, when, begin, end) in enumerate(
        zip(there.tolist(), pts.tolist(), first.tolist(), own.tolist(), strict=True)
    ):
        one = Wanted(number, when, slot)
        if found and found[-1].first == begin:
            span = found[-1]
            found[-1] = Span(begin, max(span.last, end), (*span.wanted, one))
        else:
            found.append(Span(begin, end, (one,)))
    return found, tuple(range(len(there), len(wanted)))


def feed(index: VideoIndex, first: int, last: int, wanted: Sequence[Wanted]) -> npt.NDArray[np.int32]:
    """Packets from ``first`` to ``last`` without those that are droppable and whose frames nobody wants."""
    part = index.packets[first : last + 1]
    keep = part["flags"] & PacketFlag.DROPPABLE == 0
    pts = np.array([NO_TIME if one.pts is None else one.pts for one in wanted], np.int64)
    return (first + np.flatnonzero(keep | np.isin(part["pts"], pts))).astype(np.int32)
