"""The planning that a load uses: `plan` and `repair`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vllm_omni_sched.video import plan as plans
from vllm_omni_sched.video import repair as repairs
from vllm_omni_sched.video.facts import Order, Piece, PieceResult, VideoIndex
from vllm_omni_sched.video.index import shown_pts

MOST_THREADS = 16


class GroupPlanning:
    """Plans by groups of pictures, see `vllm_omni_sched.video.plan`."""

    def plan(self, index: VideoIndex, wanted: Sequence[int], decoders: int) -> tuple[Sequence[Piece], Sequence[str]]:
        """Plan pieces; see `vllm_omni_sched.video.load.Planning`."""
        pieces = plans.plan(index, wanted, decoders).pieces
        reasons = [index.why_sequence.value] if index.why_sequence is not None else []
        # any of them may be the last one, with idle processors to lend
        return [replace(piece, threads=MOST_THREADS) for piece in pieces], reasons

    def repair(self, index: VideoIndex, outcomes: Sequence[tuple[Piece, PieceResult]]) -> tuple[Piece, str] | None:
        """Plan a repair; see `vllm_omni_sched.video.load.Planning`."""
        repair = repairs.repair(index, outcomes)
        return (repair.piece, repair.reason.value) if repair is not None else None

    def stand_ins(
        self, index: VideoIndex, candidates: Mapping[int, Iterable[int]], number: int, came_out: int
    ) -> Piece | None:
        """Plan stand-ins for missing frames; see `vllm_omni_sched.video.load.Planning`."""
        return repairs.stand_ins(index, candidates, number, came_out)

    def pts_seconds(self, index: VideoIndex, frames: Sequence[int]) -> list[float]:
        """Return when frames are shown; see `vllm_omni_sched.video.load.Planning`."""
        if index.order is Order.SEQUENCE:
            rate = index.fps or 1.0
            return [frame / rate for frame in frames]
        pts = shown_pts(index)
        numerator, denominator = index.time_base
        return [(int(pts[frame]) - int(pts[0])) * numerator / denominator for frame in frames]
