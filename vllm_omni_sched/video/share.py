"""Assignment of pieces to decoders. Pure: the state of all videos and the time in, assignments out.

Within a video: list scheduling, longest first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Among
videos: the order of `vllm_omni_sched.graph.order`, least slack first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.graph.order import SlaClass, WaitingOrder, WaitingRequest

THREADS_WORTH_SECONDS = 0.02
"""A piece shorter than this ends before more threads would pay off."""


class TakeReason(str, Enum):
    """Reason why a piece is assigned now."""

    FIRST = "first"  # its video is first in order
    NEXT = "next"  # the videos before it have no pieces left to assign
    LENT = "lent"  # as either of these, with threads lent by idle decoders


@dataclass(frozen=True)
class PieceLeft:
    """A piece that is not assigned yet.

    Attributes:
        number: unique within its video.
        cost: predicted seconds of one decoder.
        threads: most threads that may work on it.
    """

    number: int
    cost: float
    threads: int = 1


@dataclass(frozen=True)
class VideoWork:
    """A video with unassigned pieces.

    Attributes:
        key: unique key of the video.
        arrival: arrival time in seconds, on the clock of ``now``.
        kind: kind of decoders that may decode it.
    """

    key: int
    arrival: float
    sla: SlaClass
    kind: str
    left: tuple[PieceLeft, ...]


@dataclass(frozen=True)
class Seat:
    """An idle decoder, and the video that it still has open, if any."""

    decoder: int
    kind: str
    opened: int | None = None


@dataclass(frozen=True)
class Take:
    """The assignment of a piece to a decoder, with a number of threads."""

    decoder: int
    video: int
    piece: int
    threads: int
    reason: TakeReason


class Share:
    """Assigns pieces to decoders.

    1. No decoder is idle while a piece waits that it may decode.
    2. Videos are ordered by class, then least slack first: arrival + the class's TTFT target - now - the remaining
       work, divided among all decoders of its kind. A late video goes behind those of its class that are not late; one
       that has waited ``max_wait_seconds`` goes first. See `WaitingOrder`. Equal videos go one after the other, not in
       turns, which would finish all of them as late as the last.
    3. Within a video, the longest piece goes first, so that the last ones to end are short.
    4. Among idle decoders, the one that has the video open takes the piece.
    5. When all pieces are assigned, processors of the decoders that are still idle are lent to the assigned pieces as
       threads, longest first, minus the threads lent before.

    Raises:
        ConfigError: ``max_wait_seconds`` is not above 0.
    """

    def __init__(self, max_wait_seconds: float = 30.0, max_threads: int = 16) -> None:
        self._order = WaitingOrder(max_wait_seconds)
        self._max_threads = max_threads

    def plan(
        self, videos: Sequence[VideoWork], idle: Sequence[Seat], decoders: dict[str, int], lent: int, now: float
    ) -> tuple[Take, ...]:
        """Return the assignments to make now, at most one for each decoder.

        Args:
            videos: videos with unassigned pieces.
            idle: idle decoders.
            decoders: number of decoders by kind, idle or not.
            lent: total of threads beyond one of the pieces being decoded.
        """
        takes: list[tuple[Take, PieceLeft]] = []
        for kind in dict.fromkeys(seat.kind for seat in idle):
            seats = [seat for seat in idle if seat.kind == kind]
            queue = self._queue([video for video in videos if video.kind == kind], decoders.get(kind, 1), now)
            taken = [
                (Take(decoder, video.key, piece.number, 1, reason), piece)
                for decoder, (video, piece, reason) in self._seated(seats, queue)
            ]
            if len(taken) == len(queue):
                taken = self._with_threads(taken, len(seats) - len(taken) - lent)
            takes += taken
        return tuple(take for take, _ in takes)

    def _seated(
        self, seats: Sequence[Seat], queue: Sequence[tuple[VideoWork, PieceLeft, TakeReason]]
    ) -> list[tuple[int, tuple[VideoWork, PieceLeft, TakeReason]]]:
        free, seated = list(seats), []
        for one in queue[: len(seats)]:
            seat = next((seat for seat in free if seat.opened == one[0].key), free[0])
            free.remove(seat)
            seated.append((seat.decoder, one))
        return seated

    def _queue(
        self, videos: Sequence[VideoWork], decoders: int, now: float
    ) -> list[tuple[VideoWork, PieceLeft, TakeReason]]:
        by_key = {f"{video.key:020}": video for video in videos}
        waiting = [
            WaitingRequest(key, video.arrival, video.sla, sum(piece.cost for piece in video.left) / decoders)
            for key, video in by_key.items()
        ]
        queue = []
        for place, placed in enumerate(self._order.plan(waiting, now)):
            video = by_key[placed.request.request_id]
            reason = TakeReason.NEXT if place else TakeReason.FIRST
            pieces = sorted(video.left, key=lambda piece: (-piece.cost, piece.number))
            queue += [(video, piece, reason) for piece in pieces]
        return queue

    def _with_threads(self, taken: list[tuple[Take, PieceLeft]], spare: int) -> list[tuple[Take, PieceLeft]]:
        threads = [1] * len(taken)
        able = [
            place
            for place, (_, piece) in sorted(enumerate(taken), key=lambda one: -one[1][1].cost)
            if piece.threads > 1 and piece.cost > THREADS_WORTH_SECONDS
        ]
        while spare > 0 and able:
            for place in list(able):
                if threads[place] >= min(taken[place][1].threads, self._max_threads):
                    able.remove(place)
                elif spare > 0:
                    threads[place] += 1
                    spare -= 1
        return [
            (Take(take.decoder, take.video, take.piece, count, TakeReason.LENT if count > 1 else take.reason), piece)
            for (take, piece), count in zip(taken, threads, strict=True)
        ]
