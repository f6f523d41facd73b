"""Cuts a video into spans of packets, and joins them to the pieces that decoders work on in parallel. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.video.facts import Order, PacketFlag, Piece, WantedFrame
from vllm_omni_sched.video.frame_order import shown_pts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vllm_omni_sched.video.facts import VideoIndex

_PIECES_PER_DECODER = 6
"""Target number of pieces per decoder: with several, the last one to finish does not delay the load much."""

_TIMES_ITS_OVERHEAD = 20
"""A piece that costs this many overheads is not joined to another: little is left to save, and long pieces balance
badly."""


class Rates(NamedTuple):
    """Cost of decoding for one decoder, in seconds. The defaults are for H.264 on one core of 2.5 GHz.

    Attributes:
        per_pixel: cost of a pixel of a decoded frame.
        per_byte: cost of a byte of a packet.
        per_piece: cost of beginning, ending and handing over a piece.
    """

    per_pixel: float = 1e-9
    per_byte: float = 1e-7
    per_piece: float = 1e-3

    def seconds(self, index: VideoIndex, packets: npt.NDArray[np.int32]) -> float:
        """Return the predicted seconds of one decoder for a piece of these packets."""
        pixels = index.width * index.height * len(packets)
        nbytes = int(index.packets["nbytes"][packets].sum(dtype=np.int64))
        return self.per_piece + self.per_pixel * pixels + self.per_byte * nbytes


class Plan(NamedTuple):
    """The plan by which a video is decoded.

    Attributes:
        pieces: the pieces, longest first, which is the order to begin them in.
        slots: number of output slots, one for each wanted frame.
        absent: slots of frames that the video does not have.
    """

    pieces: tuple[Piece, ...]
    slots: int
    absent: tuple[int, ...] = ()


def plan(index: VideoIndex, numbers: Sequence[int], decoders: int = 1, rates: Rates = Rates()) -> Plan:  # noqa: B008
    """Plan the decoding of some frames.

    1. A video whose frames are known by pts is cut at its starts (`cut_at_starts`); packets that are neither wanted nor
       needed are left out.
    2. Short adjacent pieces are joined until a piece is worth its overhead.
    3. Any other video is one piece, from its first packet to the last wanted frame.

    Args:
        index: index of the video.
        numbers: numbers of the wanted frames in display order, from 0: ascending, each once; the n-th goes to slot n.
        decoders: number of decoders that may work on it.
        rates: costs by which pieces are predicted.

    Raises:
        RequestError: numbers are negative, or not ascending.
    """
    wanted = list(map(int, numbers))
    if any(b <= a for a, b in zip([-1, *wanted], wanted, strict=False)):
        raise RequestError("the numbers of the wanted frames of a video must be ascending and not negative, each once")
    if not wanted:
        return Plan((), 0)
    if index.order is Order.SEQUENCE:
        return Plan((in_sequence(index, wanted, rates),), len(wanted))
    found = cut_at_starts(index, wanted)
    pieces = [_piece(index, wanted, found, span, rates) for span in _joined(index, found, decoders, rates)]
    pieces.sort(key=lambda piece: -piece.cost)
    numbered = tuple(replace(piece, number=number) for number, piece in enumerate(pieces))
    return Plan(numbered, len(wanted), tuple(range(len(found.pts), len(wanted))))


def in_sequence(index: VideoIndex, numbers: Sequence[int], rates: Rates) -> Piece:
    """Return one piece of all packets, in file order, whose frames are counted as they are decoded."""
    packets = np.arange(len(index.packets), dtype=np.int32)
    wanted = tuple(WantedFrame(number, None, slot) for slot, number in enumerate(numbers))
    return Piece(0, packets, wanted, Order.SEQUENCE, rates.seconds(index, packets))


def _joined(index: VideoIndex, found: Spans, decoders: int, rates: Rates) -> list[Span]:
    """Join short neighbouring spans, up to each piece's share of the whole."""
    counts = np.cumsum(found.keep)
    nbytes = np.cumsum(np.where(found.keep, index.packets["nbytes"], 0))
    each = [
        rates.per_piece
        + rates.per_pixel * index.width * index.height * float(counts[span.last] - counts[span.first] + 1)
        + rates.per_byte * float(nbytes[span.last] - nbytes[span.first])
        for span in found.spans
    ]
    share = min(sum(each) / (decoders * _PIECES_PER_DECODER), _TIMES_ITS_OVERHEAD * rates.per_piece)
    joined: list[Span] = []
    spent = 0.0
    for span, cost in zip(found.spans, each, strict=True):
        if joined and span.first <= joined[-1].last + 1 and spent + cost <= share:
            before = joined[-1]
            joined[-1] = Span(before.first, max(before.last, span.last), before.begin, span.end)
            spent += cost
        else:
            joined.append(span)
            spent = cost
    return joined


def _piece(index: VideoIndex, numbers: Sequence[int], found: Spans, span: Span, rates: Rates) -> Piece:
    packets = packets_to_feed(index, span, found.keep)
    slots = range(span.begin, span.end)
    pts = found.pts[span.begin : span.end].tolist()
    wanted = tuple(WantedFrame(numbers[slot], when, slot) for slot, when in zip(slots, pts, strict=True))
    return Piece(0, packets, wanted, Order.PTS, rates.seconds(index, packets))


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


def cut_at_starts(index: VideoIndex, numbers: Sequence[int]) -> Spans:
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
    last = np.searchsorted(at, pts, side="right") - 1
    return np.where(last >= 0, starts[np.maximum(last, 0)], 0) if len(starts) else np.zeros(len(pts), np.int64)


def packets_to_feed(index: VideoIndex, span: Span, keep: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Return the indices of a span's packets to decode."""
    part = index.packets[span.first : span.last + 1]
    # frames shown before the start belong to the previous span; decoded from here they would be damaged
    foreign = (part["flags"] & PacketFlag.DROPPABLE != 0) & (part["pts"] < part["pts"][0])
    return (span.first + np.flatnonzero(keep[span.first : span.last + 1] & ~foreign)).astype(np.int32)
