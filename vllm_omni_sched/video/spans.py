"""Determines the packets that wanted frames need. Pure."""

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
    """A run of packets, and the wanted frames that can be decoded from it.

    Attributes:
        first: index of the packet where decoding begins.
        last: index of the last needed packet.
        begin, end: range of its frames among the wanted ones, end exclusive.
    """

    first: int
    last: int
    begin: int
    end: int


class Spans(NamedTuple):
    """A video, cut where decoding can begin.

    Attributes:
        spans: spans with wanted frames, by display order.
        pts: pts of the wanted frames that the video has; the ones that it does not have come last.
        keep: whether each packet is decoded with its span: bool of shape (number of packets,).
    """

    spans: list[Span]
    pts: npt.NDArray[np.int64]
    keep: npt.NDArray[np.bool_]


def cut(index: VideoIndex, numbers: Sequence[int]) -> Spans:
    """Cut a video whose frames are known by pts.

    1. Frame n is the one with the n-th pts of all shown frames.
    2. It is decoded from the last start whose pts is not after its own; before the first start, from the first packet.
    3. Packets up to its own are needed, in file order. With an open GOP that is past the next start: frames that are
       shown before a start may come after it in the file.
    4. Droppable packets of unwanted frames are left out.

    Args:
        index: index of the video, in `Order.PTS`.
        numbers: numbers of the wanted frames, ascending, each once.
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
    starts = starts[packets["pts"][starts] == highest[starts]]  # a packet shown before an earlier packet is not a start
    at = packets["pts"][starts]
    place = np.searchsorted(at, pts, side="right") - 1
    return np.where(place >= 0, starts[np.maximum(place, 0)], 0) if len(starts) else np.zeros(len(pts), np.int64)


def feed(index: VideoIndex, span: Span, keep: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Return the indices of a span's packets to decode."""
    part = index.packets[span.first : span.last + 1]
    # frames shown before the start belong to the previous span; decoded from here they would be damaged
    foreign = (part["flags"] & PacketFlag.DROPPABLE != 0) & (part["pts"] < part["pts"][0])
    return (span.first + np.flatnonzero(keep[span.first : span.last + 1] & ~foreign)).astype(np.int32)
