"""The process that decodes a stream: ``python -m vllm_omni_sched.video.live.worker DATA CONTROL MEMORY OWNER``.

The arguments are the numbers of two sockets, for the stream's bytes and for messages, the bytes of memory that it may
use, and the id of its owner's process, with which it ends.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Iterator
from typing import Any

import av

from vllm_omni_sched.config.errors import VideoInputError, VideoLimitError
from vllm_omni_sched.video import sandbox
from vllm_omni_sched.video.decoders.convert import Converter
from vllm_omni_sched.video.demux import FORMATS, reason_of
from vllm_omni_sched.video.live.messages import (
    Arrived,
    Ended,
    Failed,
    Opened,
    Ready,
    RingMemory,
    StreamSettings,
    from_owner,
)
from vllm_omni_sched.video.live.ring import Ring
from vllm_omni_sched.video.live.sampling import Sampler, Sampling
from vllm_omni_sched.video.pool.channel import Channel
from vllm_omni_sched.video.pool.messages import Failure

_PROBE = {
    "probesize": str(1 << 20),
    "analyzeduration": "1",  # microsecond: do not read ahead to guess the frame rate
    "fpsprobesize": "0",
}
_DEFAULT_RATE = 25  # FFmpeg's default for streams without a rate
_FILE_BYTES = 1 << 20  # it writes none


class OwnerGone(Exception):
    """The owner has closed its end."""


class Stream:
    """Decodes one stream.

    Args:
        data: descriptor of the stream's bytes.
    """

    def __init__(self, data: int, channel: Channel, settings: StreamSettings) -> None:
        self._data, self._channel, self._settings = data, channel, settings
        self._sampler = Sampler(Sampling(settings.every, settings.fps))
        self._ring: Ring | None = None
        self._size = (0, 0)
        self._decoded = self._dropped = self._damaged = 0
        self._first: float | None = None

    def run(self) -> Ended:
        """Decode until the stream ends.

        Raises:
            VideoInputError: it has no video that can be decoded.
            VideoLimitError: its frames are too large.
            OwnerGone: the owner has closed its end.
        """
        options = {"fd": str(self._data), "protocol_whitelist": "fd", "format_whitelist": FORMATS, **_PROBE}
        try:
            container = av.open("fd:", options=options, metadata_errors="replace")
        except (av.FFmpegError, ValueError) as error:
            raise VideoInputError(
                f"this is not a readable video stream ({reason_of(error)}); an MP4 must be fragmented"
            ) from None
        with container:
            if not container.streams.video:
                raise VideoInputError("the stream has no video")
            stream = container.streams.video[0]
            context = stream.codec_context
            self._check(context.width, context.height)
            context.options = {"max_pixels": str(self._settings.max_pixels)}
            context.thread_count = 1  # several threads would hold frames back
            rate = stream.average_rate or context.framerate
            for frame in self._frames(container, stream):
                # not frame.time: the last frames have no time base any more
                known = frame.pts is not None
                seconds = float(frame.pts * stream.time_base if known else self._decoded / (rate or _DEFAULT_RATE))
                self._handle_frame(frame, seconds)
        if not self._decoded:
            raise VideoInputError("the stream has no frame that can be decoded")
        return Ended(self._decoded, self._dropped, self._damaged)

    def _frames(self, container: Any, stream: Any) -> Iterator[Any]:
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
            except av.FFmpegError:  # the container is truncated; frames in the decoder are still sound
                self._damaged += 1
                packet = None
            try:
                yield from stream.codec_context.decode(packet if packet is not None and packet.size else None)
            except av.EOFError:
                return
            except av.FFmpegError:
                self._damaged += 1
            if packet is None or not packet.size:
                return

    def _handle_frame(self, frame: Any, seconds: float) -> None:
        number, self._decoded = self._decoded, self._decoded + 1
        if self._first is None:
            self._first = seconds
        seconds -= self._first
        if self._ring is None:
            self._open(frame)
        if not self._sampler.wants(number, seconds):
            return
        if (frame.width, frame.height) != self._size:
            raise VideoInputError(
                f"the size of frames changes within the stream, from {self._size[0]}x{self._size[1]} to "
                f"{frame.width}x{frame.height}; start a new stream for the new size"
            )
        slot = self._free_slot()
        if slot is None:
            self._dropped += 1
            return
        assert self._ring is not None
        self._converter.convert(frame, self._ring.pixels(slot))
        self._ring.mark(slot)
        self._send(Arrived(slot, number, seconds))

    def _open(self, frame: Any) -> None:
        self._check(frame.width, frame.height)
        self._size = (frame.width, frame.height)
        rotation = -round(frame.rotation) % 360 if frame.rotation else 0
        self._converter = Converter(rotation)
        width, height = self._size[::-1] if rotation in (90, 270) else self._size
        self._send(Opened(width, height))
        try:
            received = self._channel.receive(wait=True)
        except EOFError:
            raise OwnerGone from None
        assert received is not None
        message, (memory, free) = received
        assert isinstance(message, RingMemory)
        self._ring = Ring(memory, free, self._settings.slots, height, width)
        os.close(memory)

    def _free_slot(self) -> int | None:
        """Return a slot to write into; None if the frame is to be dropped."""
        assert self._ring is not None
        while (slot := self._ring.free_slot()) is None and not self._settings.drop:
            either: list[Any] = [self._ring, self._channel]
            readable, _, _ = select.select(either, [], [])
            if self._channel in readable:  # no message follows the room: the owner has closed its end
                raise OwnerGone
            self._ring.reset_event()
        return slot

    def _check(self, width: int, height: int) -> None:
        if width * height > self._settings.max_pixels:
            raise VideoLimitError(
                f"a frame has {width * height} pixels ({width}x{height}), but option 'max_pixels' allows "
                f"{self._settings.max_pixels}; send a smaller video or raise the option"
            )

    def _send(self, message: Any) -> None:
        try:
            self._channel.send(message, wait=True)
        except OSError:
            raise OwnerGone from None


def main() -> None:
    """Enter the sandbox, decode, and report the outcome."""
    data, control, memory_bytes, owner = map(int, sys.argv[1:])
    sandbox.die_with_parent(owner)  # nothing else would end a process that spins
    av.logging.set_level(av.logging.PANIC)
    channel = Channel(socket.socket(fileno=control), from_owner)
    try:
        received = channel.receive(wait=True)
        assert received is not None
        missing = sandbox.enter(sandbox.Profile.CPU, memory_bytes=memory_bytes, file_bytes=_FILE_BYTES)
        channel.send(Ready(tuple(part.value for part in missing)), wait=True)
        answer = _outcome(Stream(data, channel, received[0]))
        channel.send(answer, wait=True)
    except (OwnerGone, EOFError, BrokenPipeError):
        return


def _outcome(stream: Stream) -> Ended | Failed:
    try:
        return stream.run()
    except VideoLimitError as error:
        return Failed(Failure.LIMIT, str(error))
    except VideoInputError as error:
        return Failed(Failure.INPUT, str(error))
    except MemoryError:
        return Failed(Failure.MEMORY, "")
    except OwnerGone:
        raise
    except Exception as error:  # noqa: BLE001 - any error is reported to the owner
        return Failed(Failure.INTERNAL, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
