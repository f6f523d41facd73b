"""What to decode anew after damage. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_omni_sched.video.facts import Piece
from vllm_omni_sched.video.plan import Rates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_omni_sched.video.facts import PieceResult, VideoIndex


class RepairReason(str, Enum):
    """Why a piece is decoded anew, from the first packet on."""

    DAMAGED = "damaged"  # its decoder complained
    MISSING = "missing"  # frames did not come out


class Repair(NamedTuple):
    """One piece for all that was damaged, and why."""

    piece: Piece
    reason: RepairReason


def repair(
    index: VideoIndex,
    outcomes: Sequence[tuple[Piece, PieceResult]],
    rates: Rates = Rates(),  # noqa: B008
) -> Repair | None:
    """Plan anew what was damaged; call it once, when all pieces of a video are done.

    A decoder that meets damage goes on with what it has decoded before, and that differs between one that began in
    the middle and one that began with the first packet; likewise with what was left out, and with the number of
    threads. What is damaged is to come out as a plain decoder would give it, so it is done as that does it: from the
    first packet, with nothing left out, by one thread. All damaged pieces together, so that the first packets are
    decoded once. What is damaged or missing after that is so for everyone: there is no second repair.

    Damage in packets that nobody wants and nobody needs is not seen, as they are not decoded. A plain decoder may
    carry it into frames beside or behind them; here these come out as if those packets were sound.

    Args:
        index: of the video.
        outcomes: pieces, and what came of each. One that a dead decoder left has a result that found nothing.
        rates: to predict what the piece costs.

    Returns:
        A piece whose frames replace those of the pieces it repairs: before it is decoded their slots count as empty.
        None when there is nothing to repair.
    """
    bad = [piece for piece, result in outcomes if _is_bad(piece, result)]
    if not bad:
        return None
    damaged = any(result.damaged for piece, result in outcomes if _is_bad(piece, result))
    wanted = sorted((one for piece in bad for one in piece.wanted), key=lambda one: one.frame)
    last = max(int(piece.feed[-1]) for piece in bad)
    packets = np.arange(last + 1, dtype=np.int32)
    piece = Piece(
        number=max(piece.number for piece, _ in outcomes) + 1,
        feed=packets,
        wanted=tuple(wanted),
        order=bad[0].order,
        cost=rates.seconds(index, packets),
        attempt=1,
    )
    return Repair(piece, RepairReason.DAMAGED if damaged else RepairReason.MISSING)


def _is_bad(piece: Piece, result: PieceResult) -> bool:
    if piece.attempt:
        return False
    as_plain = piece.threads == 1 and len(piece.feed) == piece.feed[-1] + 1  # no other decoding gives more
    return not as_plain and (result.damaged or len(result.found) < len(piece.wanted))
