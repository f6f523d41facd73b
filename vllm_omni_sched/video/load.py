"""A load of a video, from bytes to frames; it runs in the caller's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import Empty
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import DecoderError, VideoDeadlineError, VideoError, VideoInputError, VideoLimitError
from vllm_omni_sched.video import plan, repair
from vllm_omni_sched.video.decoders.nvdec.limits import refusal_by_index
from vllm_omni_sched.video.device_memory import DeviceFrames, DeviceRoom
from vllm_omni_sched.video.facts import Order, Piece, PieceResult, SequenceReason, VideoIndex
from vllm_omni_sched.video.frame_memory import FrameBuffer, FrameMemory
from vllm_omni_sched.video.frame_order import pts_seconds
from vllm_omni_sched.video.on_device import FramesReason, of_video
from vllm_omni_sched.video.options import Limits
from vllm_omni_sched.video.packet_memory import PacketMemory
from vllm_omni_sched.video.pool import messages
from vllm_omni_sched.video.pool.channel import memory_file
from vllm_omni_sched.video.pool.dispatcher import Dispatcher
from vllm_omni_sched.video.pool.job import Answer, Job, JobClosed, LostTask, Task
from vllm_omni_sched.video.pool.kinds import CPU
from vllm_omni_sched.video.pool.messages import Failure
from vllm_omni_sched.video.results import STAGES, DecodedVideo, Report

_INDEX_SECONDS, _INDEX_BYTES_PER_SECOND = 0.02, 1e9  # rough cost of an index
_MAX_THREADS = 16  # for a piece: any may be the last one, with idle processors to lend
_MAX_SUBSTITUTES = 64  # following frames that are tried in place of a missing one


class Fallback(str, Enum):
    """Irregularity of a load, besides the reasons of plans and repairs."""

    DECODER_ABSENT = "decoder_absent"  # decoders of the preferred kind cannot be started
    DECODER_REFUSED = "decoder_refused"  # decoders of the preferred kind cannot decode this video
    DECODER_DIED = "decoder_died"  # two processes ended at a piece; on a CPU, its frames are missing
    DECODER_FAILED = "decoder_failed"  # a decoder raised an unexpected error; the frames of a piece are missing
    MISSING = "missing"  # a wanted frame could not be decoded
    RECOVERED = "recovered"  # a later frame stands in for a missing one


@dataclass
class VideoLoad:
    """Runs one load of a video.

    Attributes:
        job: the load as the dispatcher knows it; the creator must finish it.
        deadline: latest end, on ``clock``.
        kind: kind of decoders for its pieces.
        decoders: number of decoders of that kind.
        progress: called with the numbers of decoded and of wanted frames.
        frames_decoded: most frames that one piece has given.
        disordered: whether frames are counted, because their pts are in another order.
        problem: the last failure of a decoder that may not be due to the video.
        device_frames: returns the memory for frames that stay on a device; None for the host's.
        on_device: whether frames are being written there.
        left_device: whether that failed, so that the host gets them.
    """

    job: Job
    dispatcher: Dispatcher
    frames: FrameMemory
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
    packets: PacketMemory | None = None
    frames_decoded: int = 0
    disordered: bool = False
    problem: str = ""
    device_frames: Callable[[], DeviceFrames | FramesReason] | None = None
    on_device: bool = False
    left_device: bool = False

    def run(
        self, data: bytes | memoryview, choose: Callable[[VideoIndex], Iterable[int]], recovery: bool
    ) -> DecodedVideo:
        """Index, decode and assemble; see `FlashCodec.load`."""
        index, packets_fd = self._index(data)
        wanted = sorted(set(choose(index)))
        height, width = (index.width, index.height) if index.rotation in (90, 270) else (index.height, index.width)
        shape = (len(wanted), height, width, 3)
        found = list(range(len(wanted)))
        if wanted:
            nbytes = shape[0] * height * width * 3
            self.limits.check_output(nbytes)
            if (decoded := self._stay_on_device(index, packets_fd, wanted, shape)) is not None:
                return decoded
            self._open(index, packets_fd, nbytes)
            written = self._decode(index, wanted)
            if self.disordered:
                index = replace(index, order=Order.SEQUENCE, why_sequence=SequenceReason.DISORDER)
            if recovery:
                self._recover(index, wanted, written)
            found = [slot for slot in found if slot in written]
            self.fallbacks += [Fallback.MISSING.value] * (len(wanted) - len(found))
            if not found:
                none = f"none of the {len(wanted)} wanted frames could be decoded"
                if self.problem:
                    raise DecoderError(f"{none}: {self.problem}")
                raise VideoInputError(f"{none}: the video is damaged")
        began = self.clock()
        buffer = self.job.frames
        frames = buffer.array().reshape(shape) if isinstance(buffer, FrameBuffer) else np.empty(shape, np.uint8)
        for position, slot in enumerate(found):
            if position != slot:
                frames[position] = frames[slot]
                self.copied += frames[slot].nbytes
        frames = frames[: len(found)]
        indices = [wanted[slot] for slot in found]
        shown_at = pts_seconds(index, indices)
        self.seconds["assemble"] += self.clock() - began
        return DecodedVideo(frames, indices, shown_at, index, self._report(len(found)))

    def _report(self, used: int) -> Report:
        return Report(self.seconds, self.pieces, self.decoded, used, self.copied, tuple(self.fallbacks))

    def _stay_on_device(
        self, index: VideoIndex, packets_fd: int, wanted: list[int], shape: tuple[int, ...]
    ) -> DecodedVideo | None:
        """Decode all wanted frames into memory of a device; return None if the host gets them, and note why.

        What a device decodes is exact and complete, or an error. After any error the whole video is decoded on CPUs.
        """
        if self.device_frames is None:
            return None
        nbytes = int(np.prod(shape, dtype=np.int64))
        memory = self.device_frames()
        reason = memory if isinstance(memory, FramesReason) else of_video(nbytes, memory.max_bytes)
        if reason is FramesReason.ON_DEVICE and refusal_by_index(index) is not None:
            reason, self.kind = FramesReason.REFUSED, CPU  # without waiting for room
        if reason is FramesReason.ON_DEVICE and not isinstance(memory, FramesReason):
            began = self.clock()
            room = memory.allocate(nbytes, self._seconds_left)
            self.seconds["wait"] += self.clock() - began
            self._open_in(room, messages.Open(room.start, nbytes, on_device=True), index, packets_fd)
            pieces = plan.plan(index, wanted, self.decoders).pieces
            self.pieces += len(pieces)
            written: set[int] = set()
            self.on_device = True
            outcomes = self._outcomes(pieces, self.kind, written, len(wanted), nbytes // len(wanted))
            self.on_device = False
            disordered = any(result.disordered for _, result in outcomes)
            if not self.left_device and not disordered and len(written) == len(wanted):
                if index.why_sequence is not None:
                    self.fallbacks.append(index.why_sequence.value)
                frames = room.tensor().reshape(shape)
                return DecodedVideo(frames, wanted, pts_seconds(index, wanted), index, self._report(len(wanted)))
            reason, self.kind = FramesReason.REFUSED, CPU
        self.fallbacks.append(reason.value)
        return None

    def _index(self, data: bytes | memoryview) -> tuple[VideoIndex, int]:
        """Return the index, and the descriptor of the packets' bytes."""
        nbytes = memoryview(data).nbytes
        self.limits.check_input(nbytes)
        began = self.clock()
        file = memory_file("omni-sched-video", data)
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
        event = self._next_event()
        self.seconds["wait"] += max(0.0, task.started_at - task.queued_at)
        if isinstance(event, LostTask):
            if event.failure is None:
                raise VideoInputError(
                    f"the video cannot be read: two decoder processes ended while reading it; {event.message}"
                )
            raise DecoderError(event.message)
        answer, fds = event.message, event.fds
        self.job.fds += fds
        if isinstance(answer, messages.Failed):
            raise error_of(answer)
        try:
            index = messages.decode_index(answer.index)
            packets_fd = file if index.in_file else fds[0]
            check_consistent(index, os.fstat(packets_fd).st_size)
        except Exception:  # noqa: BLE001 - the index comes from a process that has read untrusted bytes
            raise VideoInputError("the video cannot be read: its index is inconsistent") from None
        self.seconds["index"] += answer.seconds
        self.limits.check_index(index)
        if packets_fd == file:
            self.packets = PacketMemory(file, data, index)
        else:  # the file is not needed any more, and may be large
            self.job.fds.remove(file)
            os.close(file)
        return index, packets_fd

    def _open(self, index: VideoIndex, packets_fd: int, nbytes: int) -> None:
        began = self.clock()
        frames = self.frames.allocate(nbytes, self._seconds_left)
        self.seconds["wait"] += self.clock() - began
        self._open_in(frames, messages.Open(frames.start, nbytes), index, packets_fd)

    def _open_in(
        self, room: FrameBuffer | DeviceRoom, message: messages.Open, index: VideoIndex, packets_fd: int
    ) -> None:
        index_fd = memory_file("omni-sched-index", messages.encode_index(index))
        self.job.fds.append(index_fd)
        self.job.frames = room
        self.job.open_message = message, (packets_fd, index_fd)

    def _decode(self, index: VideoIndex, wanted: Sequence[int]) -> set[int]:
        """Decode frames, and repair damaged ones; return the wanted slots that were written."""
        pieces = [replace(piece, threads=_MAX_THREADS) for piece in plan.plan(index, wanted, self.decoders).pieces]
        if index.why_sequence is not None:
            self.fallbacks.append(index.why_sequence.value)
        self.pieces += len(pieces)
        written: set[int] = set()
        outcomes = self._outcomes(pieces, self.kind, written, len(wanted))
        repaired = repair.repair(index, outcomes)
        if repaired is not None:
            piece = repaired.piece
            self.fallbacks.append(repaired.reason.value)
            self.pieces += 1
            self.disordered = piece.order is not index.order
            written -= {frame.slot for frame in piece.wanted}
            self._outcomes([piece], CPU, written, len(wanted))
        return written

    def _outcomes(
        self, pieces: Sequence[Piece], kind: str, written: set[int], slots: int, frame_bytes: int = 0
    ) -> list[tuple[Piece, PieceResult]]:
        """Decode pieces, and add the slots that were written to ``written``.

        Args:
            frame_bytes: size of a frame that is copied into the memory of a device; 0: frames go to the host.
        """
        if self.packets is not None:
            self.copied += self.packets.prepare(pieces, keeps_start=kind != CPU)
        pending = self._add(pieces, kind, frame_bytes)
        outcomes = []
        queued_at, waited = self.clock(), 0.0
        while pending:
            event = self._next_event()
            task, piece = event.task, pending.pop(event.task.number)
            if not waited:  # until a decoder began the first piece; the others wait for the first, if at all
                waited = max(task.started_at - queued_at, 1e-9)
                self.seconds["wait"] += waited
            if isinstance(event, Answer) and isinstance(event.message, messages.Done):
                result = event.message.result
                outcomes.append((replace(piece, threads=task.threads), result))
                written |= {frame.slot for frame in piece.wanted} & set(result.found)
                self.decoded += result.decoded
                self.frames_decoded = max(self.frames_decoded, result.decoded)
                self.seconds["decode"] += result.decode_seconds
                self.seconds["convert"] += result.convert_seconds
                if self.progress is not None:
                    self.progress(len(written), slots)
                retried = {}
            else:
                retried = self._failed(event, piece)
                pending |= retried
            if self.packets is not None and not retried:
                self.packets.release(piece)
        return outcomes

    def _failed(self, event: Answer | LostTask, piece: Piece) -> dict[int, Piece]:
        """Handle a piece that failed; return the pieces to wait for in its place."""
        failure = event.failure if isinstance(event, LostTask) else getattr(event.message, "failure", Failure.INTERNAL)
        task = event.task
        if self.on_device:
            self.left_device = True
            if failure is Failure.START:
                self.fallbacks.append(Fallback.DECODER_ABSENT.value)
            return {}
        if task.kind != CPU:
            reasons = {None: Fallback.DECODER_DIED, Failure.START: Fallback.DECODER_ABSENT}
            self.fallbacks.append(reasons.get(failure, Fallback.DECODER_REFUSED).value)
            self.kind = CPU
            return self._add([piece], CPU)
        if failure is None:
            self.fallbacks.append(Fallback.DECODER_DIED.value)
            self.problem = f"two decoder processes ended while decoding it; {event.message}"
            return {}
        if failure is Failure.MEMORY and task.threads > 1:
            return self._add([replace(piece, threads=1)], CPU)
        if failure is Failure.INTERNAL:
            self.fallbacks.append(Fallback.DECODER_FAILED.value)
            self.problem = getattr(event.message, "message", "a decoder process sent an answer of the wrong kind")
            return {}
        raise DecoderError(event.message) if isinstance(event, LostTask) else error_of(event.message)

    def _add(self, pieces: Sequence[Piece], kind: str, frame_bytes: int = 0) -> dict[int, Piece]:
        tasks = [
            Task(_message_of(piece), kind, piece.cost, piece.threads, nbytes=frame_bytes * len(piece.wanted))
            for piece in pieces
        ]
        self.dispatcher.add(self.job, tasks)
        return {task.number: piece for task, piece in zip(tasks, pieces, strict=True)}

    def _recover(self, index: VideoIndex, wanted: list[int], written: set[int]) -> None:
        """Replace missing frames by the next decodable one before the next wanted frame, as vLLM's ``frame_recovery``.

        ``wanted`` and ``written`` are updated. No packet is decoded more than once for it, however many frames are
        missing.
        """
        candidates = {
            slot: range(wanted[slot] + 1, min(wanted[slot + 1], wanted[slot] + 1 + _MAX_SUBSTITUTES))
            for slot in range(len(wanted) - 1)
            if slot not in written
        }
        piece = repair.substitutes(index, candidates, self.pieces, self.frames_decoded)
        if piece is None:
            return
        self.pieces += 1
        for _, result in self._outcomes([piece], CPU, written, len(wanted)):
            for slot, frame in zip(result.found, result.frames, strict=False):  # the process may be compromised
                if frame not in candidates.get(slot, ()):
                    continue
                wanted[slot] = frame
                self.fallbacks.append(Fallback.RECOVERED.value)

    def _next_event(self) -> Answer | LostTask:
        try:
            event = self.job.events.get(timeout=max(0.0, self._seconds_left()))
        except Empty:
            raise VideoDeadlineError(
                "the video was not decoded in time; send a smaller one or raise option 'deadline_seconds'"
            ) from None
        if isinstance(event, JobClosed):
            raise DecoderError(event.message)
        return event

    def _seconds_left(self) -> float:
        return self.deadline - self.clock()


def _message_of(piece: Piece) -> Callable[[int, int], tuple[Any, tuple[int, ...]]]:
    def message(number: int, threads: int) -> tuple[Any, tuple[int, ...]]:
        return messages.Decode(number, msgspec.Raw(messages.encode_piece(replace(piece, threads=threads)))), ()

    return message


def error_of(failed: messages.Failed) -> VideoError:
    """Return the exception to raise for a failed task."""
    if failed.failure is Failure.LIMIT:
        return VideoLimitError(failed.message)
    if failed.failure is Failure.INPUT:
        return VideoInputError(failed.message)
    if failed.failure is Failure.MEMORY:
        return VideoLimitError(
            "the video needs more memory than a decoder process may have; send a smaller one, or raise option "
            "'worker_memory_bytes'"
        )
    if failed.failure is Failure.DECODER:
        return DecoderError(failed.message)
    return DecoderError(f"the decoder failed with an internal error, the video may be sound: {failed.message}")


def check_consistent(index: VideoIndex, nbytes: int) -> None:
    """Check an index, because it comes from a process that has read untrusted bytes.

    Raises:
        ValueError: the index is inconsistent.
    """
    packets = index.packets
    ends = packets["offset"] + packets["nbytes"]
    inside = len(packets) == 0 or (
        packets["offset"].min() >= 0 and packets["nbytes"].min() >= 0 and ends.min() >= 0 and ends.max() <= nbytes
    )
    if not inside or index.width <= 0 or index.height <= 0 or min(index.time_base) <= 0 or index.rotation % 90:
        raise ValueError("index")
