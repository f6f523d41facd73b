"""What to decode anew after damage. Pure."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_omni_sched.video.facts import Order, Piece, Wanted
from vllm_omni_sched.video.index import shown_pts
from vllm_omni_sched.video.plan import Rates, in_sequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm_omni_sched.video.facts import PieceResult, VideoIndex


class RepairReason(str, Enum):
    """Why a piece is decoded anew, from the first packet on."""

    DAMAGED = "damaged"  # its decoder complained
    MISSING = "missing"  # frames did not come out
    DISORDER = "disorder"  # frames came out in another order than that of their pts, so numbers were not theirs


class Repair(NamedTuple):
    """One piece for all that was damaged, and why."""

    piece: Piece
    reason: RepairReason


def repair(
    index: VideoIndex,
    outcomes: Sequence[tuple[Piece, PieceResult]],
    rates: Rates = Rates(),  # noqa: B008
) -> Repair | None:
    """Plan anew what was damaged, or numbered wrongly; call it once, when all pieces of a video are done.

    A decoder that meets damage goes on with what it has decoded before, and that differs between one that began in
    the middle and one that began with the first packet; likewise with what was left out, and with the number of
    threads. What is damaged is to come out as a plain decoder would give it, so it is done as that does it: from the
    first packet, with nothing left out, by one thread. All damaged pieces together, so that the first packets are
    decoded once. What is damaged or missing after that is so for everyone: there is no second repair.

    Damage in packets that nobody wants and nobody needs is not seen, as they are not decoded. A plain decoder may
    carry it into frames beside or behind them; here these come out as if those packets were sound.

    Frames of a sound piece that come out in another order than that of their pts tell that the video's pts are not to
    be trusted: all that is wanted of it is counted anew, from the first frame on.

    Args:
        index: of the video.
        outcomes: pieces, and what came of each. One that a dead decoder left has a result that found nothing.
        rates: to predict what the piece costs.

    Returns:
        A piece whose frames replace those of the pieces it repairs: before it is decoded their slots count as empty.
        None when there is nothing to repair.
    """
    if any(result.disordered and not result.damaged for _, result in outcomes):
        return Repair(_counted(index, outcomes, rates), RepairReason.DISORDER)
    bad = [piece for piece, result in outcomes if _is_bad(piece, result)]
    if not bad:
        return None
    damaged = any(result.damaged for piece, result in outcomes if _is_bad(piece, result))
    wanted = sorted((one for piece in bad for one in piece.wanted), key=lambda one: one.frame)
    last = max(int(piece.feed[-1]) for piece in bad)
    packets = np.arange(last + 1, dtype=np.int32)
    piece = Piece(
        number=_next_number(outcomes),
        feed=packets,
        wanted=tuple(wanted),
        order=bad[0].order,
        cost=rates.seconds(index, packets),
        attempt=1,
    )
    return Repair(piece, RepairReason.DAMAGED if damaged else RepairReason.MISSING)


def stand_ins(
    index: VideoIndex,
    candidates: Mapping[int, Iterable[int]],
    number: int,
    came_out: int,
    rates: Rates = Rates(),  # noqa: B008
) -> Piece | None:
    """Plan to have frames stand in for others that are missing: one plain decoding, whatever there is to try.

    Args:
        index: of the video.
        candidates: numbers of the frames for each slot, ascending; the first one that can be had is written.
        number: of the piece.
        came_out: how many frames a decoding of all packets gave at most, where frames are counted: no more come.
        rates: to predict what the piece costs.

    Returns:
        None when there is nothing to try.
    """
    pts: list[Any] = shown_pts(index).tolist() if index.order is Order.PTS else [None] * came_out
    wanted = [Wanted(n, pts[n], slot) for slot, numbers in candidates.items() for n in numbers if n < len(pts)]
    if not wanted:
        return None
    last = len(index.packets) - 1
    if index.order is Order.PTS:
        last = int(np.flatnonzero(np.isin(index.packets["pts"], [pts[one.frame] for one in wanted]))[-1])
    packets = np.arange(last + 1, dtype=np.int32)
    wanted.sort(key=lambda one: one.frame)
    return Piece(number, packets, tuple(wanted), index.order, rates.seconds(index, packets), attempt=1)


def _counted(index: VideoIndex, outcomes: Sequence[tuple[Piece, PieceResult]], rates: Rates) -> Piece:
    """All wanted frames in sequence, as a plain decoder gives them."""
    wanted = sorted((one for piece, _ in outcomes for one in piece.wanted), key=lambda one: one.frame)
    piece = in_sequence(index, [one.frame for one in wanted], rates)
    return replace(
        piece,
        number=_next_number(outcomes),
        wanted=tuple(one._replace(pts=None) for one in wanted),
        attempt=1,
    )


def _next_number(outcomes: Sequence[tuple[Piece, PieceResult]]) -> int:
    return max(piece.number for piece, _ in outcomes) + 1


def _is_bad(piece: Piece, result: PieceResult) -> bool:
    if piece.attempt:
        return False
    as_plain = piece.threads == 1 and len(piece.feed) == piece.feed[-1] + 1  # no other decoding gives more
    return not as_plain and (result.damaged or len(result.found) < len(piece.wanted))
