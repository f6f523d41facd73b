"""Plans what to decode again after damage. Pure."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_omni_sched.video.facts import Order, Piece, WantedFrame
from vllm_omni_sched.video.frame_order import shown_pts
from vllm_omni_sched.video.plan import Rates, in_sequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm_omni_sched.video.facts import PieceResult, VideoIndex

_RATES = Rates()


class RepairReason(str, Enum):
    """Reason why a piece is decoded again, from the first packet on."""

    DAMAGED = "damaged"  # its decoder reported errors
    MISSING = "missing"  # wanted frames are missing
    DISORDER = "disorder"  # frames came in another order than that of their pts, so that their numbers were wrong


class Repair(NamedTuple):
    """One piece that repairs all damaged ones, and the reason."""

    piece: Piece
    reason: RepairReason


def repair(
    index: VideoIndex,
    outcomes: Sequence[tuple[Piece, PieceResult]],
) -> Repair | None:
    """Plan to decode again what was damaged or numbered wrongly; call it once, when all pieces of a video are done.

    A decoder that meets damage continues from the frames that it has decoded before. These differ between a decoder
    that began in the middle and one that began with the first packet; they also depend on skipped packets and on the
    number of threads. Damaged frames must be the same as those of a plain decoder. Therefore they are decoded as it
    does: from the first packet, without skipping, by one thread, and all damaged pieces together, so that the first
    packets are decoded once. Frames that are damaged or missing after that are so for any decoder: there is no second
    repair.

    Damage in skipped packets is not noticed. A plain decoder may carry it into neighbouring frames; here these are
    decoded as if the skipped packets were sound.

    If frames of a sound piece come in another order than that of their pts, the video's pts cannot be trusted: all its
    wanted frames are counted again from the first frame on.

    Args:
        index: index of the video.
        outcomes: pieces and their results. A piece whose decoder died has a result without frames.

    Returns:
        A piece whose frames replace those of the pieces it repairs: their slots count as empty until it is decoded.
        None if there is nothing to repair.
    """
    if any(result.disordered and not result.damaged for _, result in outcomes):
        return Repair(_in_sequence(index, outcomes), RepairReason.DISORDER)
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
        cost=_RATES.seconds(index, packets),
        attempt=1,
    )
    return Repair(piece, RepairReason.DAMAGED if damaged else RepairReason.MISSING)


def substitutes(
    index: VideoIndex,
    candidates: Mapping[int, Iterable[int]],
    number: int,
    frames_decoded: int,
) -> Piece | None:
    """Plan one plain decoding of all candidates that may replace missing frames.

    Args:
        index: index of the video.
        candidates: numbers of the candidates for each slot, ascending; the first decodable one is written.
        number: number of the piece.
        frames_decoded: most frames that a decoding of all packets gave; the bound if frames are counted.

    Returns:
        The piece; None if there are no candidates.
    """
    pts: list[Any] = shown_pts(index).tolist() if index.order is Order.PTS else [None] * frames_decoded
    wanted = [WantedFrame(n, pts[n], slot) for slot, numbers in candidates.items() for n in numbers if n < len(pts)]
    if not wanted:
        return None
    last = len(index.packets) - 1
    if index.order is Order.PTS:
        last = int(np.flatnonzero(np.isin(index.packets["pts"], [pts[one.frame] for one in wanted]))[-1])
    packets = np.arange(last + 1, dtype=np.int32)
    wanted.sort(key=lambda one: one.frame)
    return Piece(number, packets, tuple(wanted), index.order, _RATES.seconds(index, packets), attempt=1)


def _in_sequence(index: VideoIndex, outcomes: Sequence[tuple[Piece, PieceResult]]) -> Piece:
    """Return all wanted frames in sequence, as a plain decoder gives them."""
    wanted = sorted((one for piece, _ in outcomes for one in piece.wanted), key=lambda one: one.frame)
    piece = in_sequence(index, [one.frame for one in wanted], _RATES)
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
    is_plain = piece.threads == 1 and len(piece.feed) == piece.feed[-1] + 1  # no other decoding gives more frames
    return not is_plain and (result.damaged or len(result.found) < len(piece.wanted))
