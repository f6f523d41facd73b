"""A stream as its owner sees it: it feeds bytes, and takes frames."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import (
    ConfigError,
    DecoderError,
    VideoDeadlineError,
    VideoInputError,
    VideoLimitError,
)
from vllm_omni_sched.video.live import messages
from vllm_omni_sched.video.live.process import StreamProcess
from vllm_omni_sched.video.live.ring import MAX_SLOTS, Ring, ring_bytes, ring_memory
from vllm_omni_sched.video.live.sampling import Sampling
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool.channel import close_all
from vllm_omni_sched.video.pool.messages import Failure

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_GONE_SECONDS = 0.1  # for a process that has stopped reading to end
_ERRORS = {Failure.INPUT: VideoInputError, Failure.LIMIT: VideoLimitError}


class LiveFrame(NamedTuple):
    """Holds a decoded frame of a stream.

    Attributes:
        number: number in display order, from 0, counting frames that the sampling rule left out.
        pts_seconds: when it is shown, in seconds from the first frame.
        pixels: uint8 of shape (height, width, 3), RGB, read-only, in shared memory. The array holds a slot of the
            ring until it is dropped: copy frames that you keep.
    """

    number: int
    pts_seconds: float
    pixels: npt.NDArray[np.uint8]


class Counts(NamedTuple):
    """Counts of a stream; all except ``arrived`` are 0 until the stream has ended.

    Attributes:
        decoded: frames that were decoded.
        arrived: frames that have arrived so far.
        dropped: wanted frames that were left out, because all slots were in use.
        damaged: packets that could not be decoded, and truncations of the container.
    """

    decoded: int
    arrived: int
    dropped: int
    damaged: int


class LiveVideo:
    """Decodes one stream while it arrives, in a process that is sandboxed like all decoders.

    ::

        with LiveVideo(Sampling(fps=2)) as live:
            for chunk in source:
                live.feed(chunk)
                for frame in live.ready():
                    ...
            live.end()
            for frame in live:  # the rest
                ...

    1. A frame arrives as soon as the packets that it needs do: no frame waits for the end of the stream.
    2. Two threads may feed and take frames, or one thread in turns.
    3. Memory is bounded: while ``slots`` frames wait, decoding stops, and `feed` accepts no more bytes.
    4. Frames are left out only with ``drop``, and counted.
    5. A waiting caller is woken by the end, by a failure, or by the deadline.

    MP4 must be fragmented, as in every live stream; Matroska, WebM, MPEG-TS and raw H.264 or HEVC are supported as is.

    Args:
        sampling: rule for the wanted frames.
        slots: most frames that wait to be taken, or are in use, at once.
        drop: leave out wanted frames while all slots are in use, so that the decoder keeps up with the stream.
        silence_seconds: longest time without progress while a caller waits.
        options: source of the limits on pixels, frames in memory and memory of decoder processes.

    Raises:
        ConfigError: an argument is out of range.
        DecoderError: the process cannot be started.
    """

    def __init__(
        self,
        sampling: Sampling | None = None,
        *,
        slots: int = 8,
        drop: bool = False,
        silence_seconds: float = 30.0,
        options: VideoOptions | None = None,
        clock: Clock = monotonic_seconds,
    ) -> None:
        if not 2 <= slots <= MAX_SLOTS:  # one frame is in use while the next is written
            raise ConfigError(f"live video: slots must be from 2 to {MAX_SLOTS}, got {slots}")
        if not silence_seconds > 0:
            raise ConfigError(f"live video: silence_seconds must be positive, got {silence_seconds}")
        sampling, options = sampling or Sampling(), options or VideoOptions()
        self._slots, self._options = slots, options
        self._progress, self._clock = ProgressTimeout(silence_seconds, clock), clock
        self._lock = threading.Lock()  # guards the messages of the process
        self._waiting: deque[LiveFrame] = deque()
        self._ring: Ring | None = None
        self._error: Exception | None = None
        self._ended = self._closed = False
        self._counts = Counts(0, 0, 0, 0)
        self.size: tuple[int, int] | None = None
        """Width and height of frames in pixels, once known."""
        self._message_read = os.eventfd(
            0, os.EFD_NONBLOCK | os.EFD_CLOEXEC
        )  # set when another thread has read messages of the process
        settings = messages.StreamSettings(sampling.every, sampling.fps, slots, drop, options.max_pixels)
        try:
            self._process = StreamProcess(settings, options.worker_memory_bytes)
        except OSError as error:
            os.close(self._message_read)
            raise DecoderError(f"live video: the decoder process cannot be started: {error}") from error

    @property
    def counts(self) -> Counts:
        """Return the counts so far."""
        return self._counts

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def feed(self, data: bytes | memoryview, wait_seconds: float | None = None) -> int:
        """Feed the next bytes of the stream, cut anywhere.

        Args:
            wait_seconds: how long to wait for room; 0 for not at all; None until all bytes are accepted.

        Returns:
            The number of accepted bytes; feed the others again.

        Raises:
            VideoInputError, VideoLimitError, DecoderError: decoding has failed.
            VideoDeadlineError: no progress for ``silence_seconds``: frames are not taken, or decoding hangs.
        """
        rest = memoryview(data).cast("B")
        began, taken = self._clock(), 0
        while taken < len(rest):
            if self._read_messages():
                os.eventfd_write(self._message_read, 1)
            self._check()
            if self._ended:  # bytes behind the end of the stream are ignored
                return len(rest)
            try:
                taken += self._process.data.send(rest[taken:], socket.MSG_NOSIGNAL)
                self._progress.note_progress()
            except BlockingIOError:
                patience = self._progress.note_no_room(self._returned)
                if wait_seconds is not None:
                    patience = min(patience, began + wait_seconds - self._clock())
                    if patience <= 0:
                        break
                self._wait(patience, to_send=True)
            except OSError:  # the process has ended; its last message may tell why
                self._wait(_GONE_SECONDS)
        return taken

    def end(self) -> None:
        """Announce the end of the bytes. The remaining frames still arrive, and then the end."""
        with contextlib.suppress(OSError):
            self._process.data.shutdown(socket.SHUT_WR)
        self._progress.note_progress()

    def ready(self) -> list[LiveFrame]:
        """Return the frames that have arrived and were not taken yet, without waiting.

        Raises:
            VideoInputError, VideoLimitError, DecoderError: decoding has failed, and no frame is left.
            VideoDeadlineError: `feed` found no room, and there was no progress for ``silence_seconds`` since.
        """
        self._read_messages()
        with self._lock:
            found = list(self._waiting)
            self._waiting.clear()
        if found:
            self._progress.note_progress()
        else:
            self._check()
            if self._progress.has_no_room and not self._ended:
                self._progress.note_no_room(self._returned)
        return found

    def __iter__(self) -> Iterator[LiveFrame]:
        """Yield frames until the stream ends, waiting for each.

        Raises:
            VideoInputError, VideoLimitError, DecoderError: decoding has failed.
            VideoDeadlineError: no progress for ``silence_seconds``.
        """
        began = self._clock()
        while True:
            self._read_messages()
            with self._lock:
                frame = self._waiting.popleft() if self._waiting else None
            if frame is not None:
                self._progress.note_progress()
                yield frame
                del frame  # otherwise its slot would be in use while waiting for the next frame
                began = self._clock()
                continue
            self._check()
            if self._ended:
                return
            self._wait(self._progress.seconds_left(began))

    def close(self) -> None:
        """End the process. Frames that were taken stay valid. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._waiting.clear()
        os.eventfd_write(self._message_read, 1)
        self._process.end()

    def __enter__(self) -> LiveVideo:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        news, self._message_read = getattr(self, "_message_read", -1), -1
        if news >= 0:
            os.close(news)

    @property
    def _returned(self) -> int:
        return self._ring.freed if self._ring is not None else 0

    def _check(self) -> None:
        if self._closed:
            raise DecoderError("live video: this stream was closed already")
        if self._error is not None:
            raise self._error

    def _wait(self, seconds: float, to_send: bool = False) -> None:
        """Wait for a message of the process.

        A caller that takes frames also waits for the event that another thread has read messages; a caller that feeds
        waits for room to send instead, because it would take the event from the former.
        """
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile; `_check` raises
            readers: list[Any] = [] if self._error is not None else [self._process.channel]
            if not to_send:
                readers.append(self._message_read)
            sending: list[Any] = [self._process.data] if to_send else []
            readable, _, _ = select.select(readers, sending, [], max(0.0, seconds))
            if self._message_read in readable:
                os.eventfd_read(self._message_read)

    def _read_messages(self) -> bool:
        """Read the messages of the process; return whether they changed anything."""
        with self._lock:
            before = len(self._waiting), self._error, self._ended
            while self._error is None and not self._ended and not self._closed:
                try:
                    received = self._process.channel.receive()
                    if received is None:
                        break
                    message, fds = received
                    close_all(fds)
                    self._handle(message)
                except EOFError:
                    self._error = DecoderError(f"live video: the decoder process {self._process.end()}")
                except (OSError, ValueError) as error:
                    self._error = DecoderError(f"live video: message from the decoder process cannot be used: {error}")
                self._progress.note_progress()
            return before != (len(self._waiting), self._error, self._ended)

    def _handle(self, message: Any) -> None:
        if isinstance(message, messages.Arrived):
            if self._ring is None or not 0 <= message.slot < self._slots:
                raise ValueError("it announces a frame in a slot that does not exist")
            self._waiting.append(LiveFrame(message.number, message.pts_seconds, self._ring.frame(message.slot)))
            self._counts = self._counts._replace(arrived=self._counts.arrived + 1)
        elif isinstance(message, messages.Opened):
            self._make_ring(message.width, message.height)
        elif isinstance(message, messages.Ended):
            self._counts = Counts(message.decoded, self._counts.arrived, message.dropped, message.damaged)
            self._ended = True
        elif isinstance(message, messages.Failed):
            reason = message.message or "it needs more memory than option 'worker_memory_bytes' allows"
            self._error = _ERRORS.get(message.failure, DecoderError)(f"live video: {reason}")

    def _make_ring(self, width: int, height: int) -> None:
        if not 0 < width * height <= self._options.max_pixels or self._ring is not None:
            raise ValueError(f"it announces frames of {width}x{height}, or announces them twice")
        if (nbytes := ring_bytes(self._slots, height, width)) > self._options.max_output_bytes:
            self._error = VideoLimitError(
                f"live video: {self._slots} slots of {width}x{height} need {nbytes} bytes, but option "
                f"'max_output_bytes' allows {self._options.max_output_bytes}; take fewer slots or raise the option"
            )
            return
        memory = ring_memory(nbytes)
        try:
            free = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._ring = Ring(memory, free, self._slots, height, width)
            self._process.channel.send(messages.RingMemory(), [memory, free])
        finally:
            os.close(memory)
        self.size = (width, height)


class ProgressTimeout:
    """Limits how long callers that feed a stream, or take its frames, wait without progress of the stream.

    Args:
        seconds: longest time without progress while a caller waits.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds, self._clock = seconds, clock
        self._progress_at = clock()
        self._returned = 0
        self._no_room_since = -math.inf  # when bytes first found no room since the last progress

    def note_progress(self) -> None:
        """Record that bytes or frames have moved."""
        self._progress_at = self._clock()

    def note_no_room(self, returned: int) -> float:
        """Record that bytes find no room, and return the seconds left, as `seconds_left` does.

        Repeated calls do not extend the time.

        Args:
            returned: number of slots freed so far: one more counts as progress.
        """
        if returned != self._returned:
            self._returned = returned
            self.note_progress()
        if self._no_room_since < self._progress_at:
            self._no_room_since = self._clock()
        return self.seconds_left(self._no_room_since)

    @property
    def has_no_room(self) -> bool:
        """Return whether bytes have found no room since the last progress."""
        return self._no_room_since >= self._progress_at

    def seconds_left(self, since: float) -> float:
        """Return the seconds left until there must be progress.

        Args:
            since: when the caller began to wait.

        Raises:
            VideoDeadlineError: no time is left.
        """
        left = max(self._progress_at, since) + self._seconds - self._clock()
        if left <= 0:
            raise VideoDeadlineError(
                f"live video: no bytes or frames have moved for {self._seconds:g} s (silence_seconds): feed or end the "
                "stream, and take frames"
            )
        return left
