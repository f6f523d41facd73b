"""Assignment of pieces to decoders. Pure: the state of all videos and the time in, assignments out.

Within a video: list scheduling, longest first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Among
videos: the order of `vllm_omni_sched.graph.order`, least slack first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from vllm_omni_sched.graph.order import SlaClass, WaitingOrder, WaitingRequest

THREADS_WORTH_SECONDS = 0.02
"""A piece shorter than this ends before more threads would pay off."""


class AssignmentReason(str, Enum):
    """Reason why a piece is assigned now."""

    FIRST = "first"  # its video is first in order
    NEXT = "next"  # the videos before it have no pieces left to assign
    LENT = "lent"  # as either of these, with threads lent by idle decoders


@dataclass(frozen=True)
class WaitingPiece:
    """A piece that is not assigned yet.

    Attributes:
        number: unique within its video.
        cost: predicted seconds of one decoder.
        threads: most threads that may work on it.
        nbytes: bytes of frames that its decoder copies into the memory of a device; 0: they go to the host.
    """

    number: int
    cost: float
    threads: int = 1
    nbytes: int = 0


@dataclass(frozen=True)
class WaitingVideo:
    """A video with unassigned pieces.

    Attributes:
        key: unique key of the video.
        arrival: arrival time in seconds, on the clock of ``now``.
        kind: kind of decoders that may decode it.
        pieces: its pieces that are not assigned yet; at least one.
    """

    key: int
    arrival: float
    sla: SlaClass
    kind: str
    pieces: tuple[WaitingPiece, ...]


@dataclass(frozen=True)
class IdleDecoder:
    """An idle decoder, and the video that it still has open, if any.

    Attributes:
        link_bytes_per_second: speed of its copies into the memory of frames on a device; 0.0: it does not reach it.
    """

    number: int
    kind: str
    opened: int | None = None
    link_bytes_per_second: float = 0.0


@dataclass(frozen=True)
class Assignment:
    """The assignment of a piece to a decoder, with a number of threads."""

    decoder: int
    video: int
    piece: int
    threads: int
    reason: AssignmentReason


class PieceAssigner:
    """Assigns pieces to decoders.

    1. No decoder is idle while a piece waits that it may decode.
    2. Videos are ordered by class, then least slack first: arrival + the class's TTFT target - now - the remaining
       work, divided among all decoders of its kind. A late video goes behind those of its class that are not late; one
       that has waited ``max_wait_seconds`` goes first. See `WaitingOrder`. Equal videos go one after the other, not in
       turns, which would finish all of them as late as the last.
    3. Within a video, the longest piece goes first, so that the last ones to end are short.
    4. Among idle decoders, the one that has the video open gets the piece.
    5. When all pieces are assigned, processors of the decoders that are still idle are lent to the assigned pieces as
       threads, longest first, minus the threads lent before.
    6. If frames stay on a device, a decoder that does not reach its memory gets no piece, unless none reaches it. Of
       the others, the one with the fastest link goes first, after rule 4. A slower one is left idle, against rule 1,
       if copying the frames of the piece would take longer than decoding it, and longer than the decoders with faster
       links need for all pieces of the video that wait.

    Raises:
        ConfigError: ``max_wait_seconds`` is not above 0.
    """

    def __init__(self, max_wait_seconds: float = 30.0, max_threads: int = 16) -> None:
        self._order = WaitingOrder(max_wait_seconds)
        self._max_threads = max_threads

    def plan(
        self,
        videos: Sequence[WaitingVideo],
        idle: Sequence[IdleDecoder],
        decoders: dict[str, int],
        lent_threads: int,
        now: float,
        links: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> tuple[Assignment, ...]:
        """Return the assignments to make now, at most one for each decoder.

        Args:
            videos: videos with unassigned pieces.
            idle: idle decoders.
            decoders: number of decoders by kind, idle or not.
            lent_threads: total of threads beyond one of the pieces being decoded.
            links: `IdleDecoder.link_bytes_per_second` of the decoders of each kind, idle or not; infinite for one that
                is starting.
        """
        assignments: list[tuple[Assignment, WaitingPiece]] = []
        for kind in dict.fromkeys(decoder.kind for decoder in idle):
            idle_of_kind = [decoder for decoder in idle if decoder.kind == kind]
            queue = self._queue([video for video in videos if video.kind == kind], decoders.get(kind, 1), now)
            assigned = [
                (Assignment(decoder, video.key, piece.number, 1, reason), piece)
                for decoder, (video, piece, reason) in self._on_decoders(idle_of_kind, queue, links.get(kind, ()))
            ]
            if len(assigned) == len(queue):
                assigned = self._with_threads(assigned, len(idle_of_kind) - len(assigned) - lent_threads)
            assignments += assigned
        return tuple(assignment for assignment, _ in assignments)

    def _on_decoders(
        self,
        idle_of_kind: Sequence[IdleDecoder],
        queue: Sequence[tuple[WaitingVideo, WaitingPiece, AssignmentReason]],
        links: Sequence[float],
    ) -> list[tuple[int, tuple[WaitingVideo, WaitingPiece, AssignmentReason]]]:
        free, chosen = list(idle_of_kind), []
        by_link = sorted(idle_of_kind, key=lambda decoder: -decoder.link_bytes_per_second)
        for waiting in queue:
            if not free:
                break
            video, piece, _ = waiting
            fit = free
            if piece.nbytes and any(links):
                fit = [decoder for decoder in by_link if decoder in free and _is_near(decoder, video, piece, links)]
                if not fit:
                    continue
            decoder = next((decoder for decoder in fit if decoder.opened == video.key), fit[0])
            free.remove(decoder)
            chosen.append((decoder.number, waiting))
        return chosen

    def _queue(
        self, videos: Sequence[WaitingVideo], decoders: int, now: float
    ) -> list[tuple[WaitingVideo, WaitingPiece, AssignmentReason]]:
        by_key = {f"{video.key:020}": video for video in videos}
        waiting = [
            WaitingRequest(key, video.arrival, video.sla, sum(piece.cost for piece in video.pieces) / decoders)
            for key, video in by_key.items()
        ]
        queue = []
        for position, placed in enumerate(self._order.plan(waiting, now)):
            video = by_key[placed.request.request_id]
            reason = AssignmentReason.NEXT if position else AssignmentReason.FIRST
            pieces = sorted(video.pieces, key=lambda piece: (-piece.cost, piece.number))
            queue += [(video, piece, reason) for piece in pieces]
        return queue

    def _with_threads(
        self, assigned: list[tuple[Assignment, WaitingPiece]], spare: int
    ) -> list[tuple[Assignment, WaitingPiece]]:
        threads = [1] * len(assigned)
        can_have_more = [
            n
            for n, (_, piece) in sorted(enumerate(assigned), key=lambda numbered: -numbered[1][1].cost)
            if piece.threads > 1 and piece.cost > THREADS_WORTH_SECONDS
        ]
        while spare > 0 and can_have_more:
            for n in list(can_have_more):
                if threads[n] >= min(assigned[n][1].threads, self._max_threads):
                    can_have_more.remove(n)
                elif spare > 0:
                    threads[n] += 1
                    spare -= 1
        return [
            (assignment if count == 1 else replace(assignment, threads=count, reason=AssignmentReason.LENT), piece)
            for (assignment, piece), count in zip(assigned, threads, strict=True)
        ]


def _is_near(decoder: IdleDecoder, video: WaitingVideo, piece: WaitingPiece, links: Sequence[float]) -> bool:
    """Return whether a decoder may get a piece whose frames stay on a device (rule 6)."""
    speed = decoder.link_bytes_per_second
    if not speed:
        return False
    faster = sum(link > speed for link in links)
    if not faster:
        return True
    return piece.nbytes / speed <= max(piece.cost, sum(other.cost for other in video.pieces) / faster)
