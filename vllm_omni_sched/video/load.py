"""A load of a video, from bytes to frames; it runs in the caller's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import Empty
from typing import Any, Protocol

import msgspec
import numpy as np

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.errors import DecoderError, VideoDeadlineError, VideoInputError
from vllm_omni_sched.video import messages, wire
from vllm_omni_sched.video.answers import check_sound, error_of
from vllm_omni_sched.video.base import Decoded, Report
from vllm_omni_sched.video.dispatch import Dispatcher
from vllm_omni_sched.video.facts import Order, Piece, PieceResult, SequenceReason, VideoIndex
from vllm_omni_sched.video.frames import FrameMemory
from vllm_omni_sched.video.input import Input
from vllm_omni_sched.video.job import Answer, Closed, Job, Lost, Task
from vllm_omni_sched.video.kinds import CPU
from vllm_omni_sched.video.limits import Limits
from vllm_omni_sched.video.messages import Failure

_INDEX_SECONDS, _INDEX_BYTES_PER_SECOND = 0.02, 1e9  # rough cost of an index
STAGES = ("index", "wait", "decode", "convert", "assemble")
_STAND_INS = 64  # following frames that are tried in place of a missing one


class Fallback(str, Enum):
    """Irregularity of a load, besides the reasons of plans and repairs."""

    DECODER_ABSENT = "decoder_absent"  # decoders of the preferred kind cannot be started
    DECODER_REFUSED = "decoder_refused"  # decoders of the preferred kind cannot decode this video
    DECODER_DIED = "decoder_died"  # two processes ended at a piece; on a CPU, its frames are missing
    DECODER_FAILED = "decoder_failed"  # a decoder raised an unexpected error; the frames of a piece are missing
    MISSING = "missing"  # a wanted frame could not be decoded
    RECOVERED = "recovered"  # a later frame stands in for a missing one


class Planning(Protocol):
    """Plans the packets to feed for the wanted frames; see `vllm_omni_sched.video.planning`."""

    def plan(self, index: VideoIndex, wanted: Sequence[int], decoders: int) -> tuple[Sequence[Piece], Sequence[str]]:
        """Return pieces for these frames, whose slots are their positions in ``wanted``, and reasons for
        irregularities.
        """

    def repair(self, index: VideoIndex, outcomes: Sequence[tuple[Piece, PieceResult]]) -> tuple[Piece, str] | None:
        """Return the piece to decode in place of damaged ones, and the reason; None if nothing more can be done."""

    def stand_ins(
        self, index: VideoIndex, candidates: Mapping[int, Iterable[int]], number: int, came_out: int
    ) -> Piece | None:
        """Return a piece that writes the first decodable candidate to each slot; None if there are no candidates.

        ``number`` is the piece's; ``came_out`` is the most frames that a decoding of all packets gave.
        """

    def pts_seconds(self, index: VideoIndex, frames: Sequence[int]) -> list[float]:
        """Return when frames are shown, in seconds from the first frame."""


@dataclass
class Load:
    """A load under way.

    Attributes:
        job: the load as the dispatcher knows it; the creator must finish it.
        deadline: latest end, on ``clock``.
        kind: kind of decoders for its pieces.
        decoders: number of decoders of that kind.
        progress: called with the numbers of decoded and of wanted frames.
    """

    job: Job
    dispatcher: Dispatcher
    frames: FrameMemory
    planning: Planning
    limits: Limits
    clock: Clock
    deadline: float
    kind: str
    decoders: int
    progress: Callable[[int, int], None] | None = None
    fallbacks: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    pieces: int = 0
    decoded: int = 0
    copied: int = 0
    input: Input | None = None
    came_out: int = 0  # most frames that a piece has given
    disordered: bool = False  # frames are counted, because their pts are in another order
    problem: str = ""  # the last failure of a decoder that may not be due to the video

    def run(self, data: bytes | memoryview, choose: Callable[[VideoIndex], Iterable[int]], recovery: bool) -> Decoded:
        """Index, decode and assemble; see `FlashCodec.load`."""
        index, packets = self._index(data)
        wanted = sorted(set(choose(index)))
        height, width = (index.width, index.height) if index.rotation in (90, 270) else (index.height, index.width)
        shape = (len(wanted), height, width, 3)
        found = list(range(len(wanted)))
        if wanted:
            nbytes = shape[0] * height * width * 3
            self.limits.check_output(nbytes)
            self._open(index, packets, nbytes)
            there = self._decode(index, wanted)
            if self.disordered:
                index = replace(index, order=Order.SEQUENCE, why_sequence=SequenceReason.DISORDER)
            if recovery:
                self._recover(index, wanted, there)
            found = [slot for slot in found if slot in there]
            self.fallbacks += [Fallback.MISSING.value] * (len(wanted) - len(found))
            if not found:
                none = f"none of the {len(wanted)} wanted frames could be decoded"
                if self.problem:
                    raise DecoderError(f"{none}: {self.problem}")
                raise VideoInputError(f"{none}: the video is damaged")
        began = self.clock()
        frames = np.empty(shape, np.uint8) if self.job.room is None else self.job.room.array().reshape(shape)
        for place, slot in enumerate(found):
            if place != slot:
                frames[place] = frames[slot]
                self.copied += frames[slot].nbytes
        frames = frames[: len(found)]
        indices = [wanted[slot] for slot in found]
        pts_seconds = self.planning.pts_seconds(index, indices)
        self.seconds["assemble"] += self.clock() - began
        report = Report(self.seconds, self.pieces, self.decoded, len(found), self.copied, tuple(self.fallbacks))
        return Decoded(frames, indices, pts_seconds, index, report)

    def _index(self, data: bytes | memoryview) -> tuple[VideoIndex, int]:
        """Return the index, and the descriptor of the packets' bytes."""
        nbytes = memoryview(data).nbytes
        self.limits.check_input(nbytes)
        began = self.clock()
        file = wire.memory_file("omni-sched-video", data)
        self.job.fds.append(file)
        self.copied += nbytes
        self.seconds["assemble"] += self.clock() - began
        task = Task(
            lambda number, _: (messages.Index(number, self.limits), (file,)),
            CPU,
            _INDEX_SECONDS + nbytes / _INDEX_BYTES_PER_SECOND,
            needs_open=False,
        )
        self.dispatcher.add(self.job, [task])
        event = self._next()
        self.seconds["wait"] += max(0.0, task.started - task.posted)
        if isinstance(event, Lost):
            if event.failure is None:
                raise VideoInputError(
                    f"the video cannot be read: two processes ended while reading it; {event.message}"
                )
            raise DecoderError(event.message)
        answer, fds = event.message, event.fds
        self.job.fds += fds
        if isinstance(answer, messages.Failed):
            raise error_of(answer)
        try:
            index = messages.index_in(answer.index)
            packets = file if index.in_file else fds[0]
            check_sound(index, os.fstat(packets).st_size)
        except Exception:  # noqa: BLE001 - the index comes from a process that has read untrusted bytes
            raise VideoInputError("the video cannot be read: its index is inconsistent") from None
        self.seconds["index"] += answer.seconds
        self.limits.check_index(index)
        if packets == file:
            self.input = Input(file, data, index)
        else:  # the file is not needed any more, and may be large
            self.job.fds.remove(file)
            os.close(file)
        return index, packets

    def _open(self, index: VideoIndex, packets: int, nbytes: int) -> None:
        began = self.clock()
        room = self.frames.allocate(nbytes, self._left)
        self.seconds["wait"] += self.clock() - began
        described = wire.memory_file("omni-sched-index", messages.index_out(index))
        self.job.fds.append(described)
        self.job.room = room
        self.job.opening = messages.Open(self.job.key, room.start, nbytes), (packets, described)

    def _decode(self, index: VideoIndex, wanted: Sequence[int]) -> set[int]:
        """Decode frames, and repair damaged ones; return the wanted slots that were written."""
        pieces, reasons = self.planning.plan(index, wanted, self.decoders)
        self.fallbacks += reasons
        self.pieces += len(pieces)
        there: set[int] = set()
        outcomes = self._outcomes(pieces, self.kind, there, len(wanted))
        again = self.planning.repair(index, outcomes)
        if again is not None:
            piece, reason = again
            self.fallbacks.append(reason)
            self.pieces += 1
            self.disordered = piece.order is not index.order
            there -= {one.slot for one in piece.wanted}
            self._outcomes([piece], CPU, there, len(wanted))
        return there

    def _outcomes(
        self, pieces: Sequence[Piece], kind: str, there: set[int], slots: int
    ) -> list[tuple[Piece, PieceResult]]:
        if self.input is not None:
            self.copied += self.input.need(pieces)
        pending = self._add(pieces, kind)
        outcomes = []
        posted, waited = self.clock(), 0.0
        while pending:
            event = self._next()
            task, piece = event.task, pending.pop(event.task.number)
            if not waited:  # until a decoder began the first piece; the others wait for the first, if at all
                waited = max(task.started - posted, 1e-9)
                self.seconds["wait"] += waited
            if isinstance(event, Answer) and isinstance(event.message, messages.Done):
                result = event.message.result
                outcomes.append((replace(piece, threads=task.given), result))
                there |= {one.slot for one in piece.wanted} & set(result.found)
                self.decoded += result.decoded
                self.came_out = max(self.came_out, result.decoded)
                self.seconds["decode"] += result.decode_seconds
                self.seconds["convert"] += result.convert_seconds
                if self.progress is not None:
                    self.progress(len(there), slots)
                again = {}
            else:
                again = self._failed(event, piece)
                pending |= again
            if self.input is not None and not again:
                self.input.done(piece)
        return outcomes

    def _failed(self, event: Answer | Lost, piece: Piece) -> dict[int, Piece]:
        """Handle a piece that failed; return the pieces to wait for in its place."""
        failure = event.failure if isinstance(event, Lost) else getattr(event.message, "failure", Failure.INTERNAL)
        task = event.task
        if task.kind != CPU:
            reasons = {None: Fallback.DECODER_DIED, Failure.START: Fallback.DECODER_ABSENT}
            self.fallbacks.append(reasons.get(failure, Fallback.DECODER_REFUSED).value)
            self.kind = CPU
            return self._add([piece], CPU)
        if failure is None:
            self.fallbacks.append(Fallback.DECODER_DIED.value)
            self.problem = f"two processes ended while decoding it; {event.message}"
            return {}
        if failure is Failure.MEMORY and task.given > 1:
            return self._add([replace(piece, threads=1)], CPU)
        if failure is Failure.INTERNAL:
            self.fallbacks.append(Fallback.DECODER_FAILED.value)
            self.problem = getattr(event.message, "message", "a decoder sent an answer of the wrong kind")
            return {}
        raise DecoderError(event.message) if isinstance(event, Lost) else error_of(event.message)

    def _add(self, pieces: Sequence[Piece], kind: str) -> dict[int, Piece]:
        tasks = [Task(_sending(piece), kind, piece.cost, piece.threads) for piece in pieces]
        self.dispatcher.add(self.job, tasks)
        return {task.number: piece for task, piece in zip(tasks, pieces, strict=True)}

    def _recover(self, index: VideoIndex, wanted: list[int], there: set[int]) -> None:
        """Replace missing frames by the next decodable one before the next wanted frame, as vLLM's ``frame_recovery``.

        ``wanted`` and ``there`` are updated. No packet is decoded more than once for it, however many frames are
        missing.
        """
        missing = {
            slot: range(wanted[slot] + 1, min(wanted[slot + 1], wanted[slot] + 1 + _STAND_INS))
            for slot in range(len(wanted) - 1)
            if slot not in there
        }
        piece = self.planning.stand_ins(index, missing, self.pieces, self.came_out)
        if piece is None:
            return
        self.pieces += 1
        for _, result in self._outcomes([piece], CPU, there, len(wanted)):
            for slot, frame in zip(result.found, result.frames, strict=False):  # the process may be compromised
                if frame not in missing.get(slot, ()):
                    continue
                wanted[slot] = frame
                self.fallbacks.append(Fallback.RECOVERED.value)

    def _next(self) -> Answer | Lost:
        try:
            event = self.job.events.get(timeout=max(0.0, self._left()))
        except Empty:
            raise VideoDeadlineError(
                "the video was not decoded in time; send a smaller one or raise option 'deadline_seconds'"
            ) from None
        if isinstance(event, Closed):
            raise DecoderError(event.message)
        return event

    def _left(self) -> float:
        return self.deadline - self.clock()


def _sending(piece: Piece) -> Callable[[int, int], tuple[Any, tuple[int, ...]]]:
    def message(number: int, threads: int) -> tuple[Any, tuple[int, ...]]:
        return messages.Decode(number, msgspec.Raw(messages.piece_out(replace(piece, threads=threads)))), ()

    return message
