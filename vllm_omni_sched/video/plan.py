"""Cuts a video into pieces that decoders work on in parallel. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_omni_sched.errors import RequestError
from vllm_omni_sched.video.facts import Order, Piece, Wanted
from vllm_omni_sched.video.spans import Span, Spans, cut, feed

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

    1. A video whose frames are known by pts is cut at its starts (`spans`); packets that are neither wanted nor needed
       are left out.
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
        raise RequestError("frames: give the numbers of wanted frames in ascending order, from 0, each once")
    if not wanted:
        return Plan((), 0)
    if index.order is Order.SEQUENCE:
        return Plan((in_sequence(index, wanted, rates),), len(wanted))
    found = cut(index, wanted)
    pieces = [_piece(index, wanted, found, span, rates) for span in _joined(index, found, decoders, rates)]
    pieces.sort(key=lambda piece: -piece.cost)
    numbered = tuple(replace(piece, number=number) for number, piece in enumerate(pieces))
    return Plan(numbered, len(wanted), tuple(range(len(found.pts), len(wanted))))


def in_sequence(index: VideoIndex, numbers: Sequence[int], rates: Rates) -> Piece:
    """Return one piece of all packets, in file order, whose frames are counted as they are decoded."""
    packets = np.arange(len(index.packets), dtype=np.int32)
    wanted = tuple(Wanted(number, None, slot) for slot, number in enumerate(numbers))
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
    packets = feed(index, span, found.keep)
    slots = range(span.begin, span.end)
    pts = found.pts[span.begin : span.end].tolist()
    wanted = tuple(Wanted(numbers[slot], when, slot) for slot, when in zip(slots, pts, strict=True))
    return Piece(0, packets, wanted, Order.PTS, rates.seconds(index, packets))
