"""Which packets frames need. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_omni_sched.video.facts import PacketFlag
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
        begin, end: the frames are those that are wanted from the ``begin``-th up to before the ``end``-th.
    """

    first: int
    last: int
    begin: int
    end: int


class Spans(NamedTuple):
    """A video, cut where decoding can begin.

    Attributes:
        spans: those with wanted frames, by display order.
        pts: of the wanted frames that the video has, which come before those that it has not.
        keep: of each packet, whether it is decoded when its span is: bool of shape (number of packets,).
    """

    spans: list[Span]
    pts: npt.NDArray[np.int64]
    keep: npt.NDArray[np.bool_]


def cut(index: VideoIndex, numbers: Sequence[int]) -> Spans:
    """Cut a video whose frames are known by pts.

    1. Frame n is the one with the n-th pts of those that are shown.
    2. It is decoded from the last start whose own pts is not behind its pts; before the first start, from the
       first packet.
    3. Packets are needed up to its own, in file order. With an open GOP that is past the next start: frames that
       are shown before a start may come after it in the file.
    4. What is droppable and not wanted is left out.

    Args:
        index: of the video, in `Order.PTS`.
        numbers: wanted frames, ascending, each once.
    """
    packets = index.packets
    shown = shown_pts(index)
    wanted = np.asarray(numbers, np.int64)
    pts = shown[wanted[wanted < len(shown)]]
    by_pts = np.argsort(packets["pts"])
    own = by_pts[np.searchsorted(packets["pts"], pts, sorter=by_pts)]
    keep = packets["flags"] & PacketFlag.DROPPABLE == 0
    keep[own] = True
    if not len(pts):
        return Spans([], pts, keep)
    first = _starts_of(packets, pts)
    begins = np.flatnonzero(np.diff(first, prepend=-1))
    ends = [*begins[1:].tolist(), len(pts)]
    lasts = np.maximum.reduceat(own, begins)
    return Spans(list(map(Span, first[begins].tolist(), lasts.tolist(), begins.tolist(), ends)), pts, keep)


def _starts_of(packets: npt.NDArray[np.void], pts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    starts = np.flatnonzero(packets["flags"] & PacketFlag.START)
    highest = np.maximum.accumulate(packets["pts"])
    starts = starts[packets["pts"][starts] == highest[starts]]  # one that is shown before a packet ahead of it is none
    at = packets["pts"][starts]
    place = np.searchsorted(at, pts, side="right") - 1
    return np.where(place >= 0, starts[np.maximum(place, 0)], 0) if len(starts) else np.zeros(len(pts), np.int64)


def feed(index: VideoIndex, span: Span, keep: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Packets of a span to decode, by their indices."""
    part = index.packets[span.first : span.last + 1]
    # what is shown before the start belongs to the span before; decoded from here it would be damaged
    foreign = (part["flags"] & PacketFlag.DROPPABLE != 0) & (part["pts"] < part["pts"][0])
    return (span.first + np.flatnonzero(keep[span.first : span.last + 1] & ~foreign)).astype(np.int32)
