"""A decoder process: ``python -m vllm_omni_sched.video.pool.worker``, started by `decoder_pool`.

It loads its codecs, enters the sandbox, and then serves one task at a time until its owner ends. Neither vLLM nor torch
is loaded here, so it is small and starts quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import mmap
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import DecoderError, VideoInputError, VideoLimitError
from vllm_omni_sched.heap import keep_freed_memory, return_free_memory
from vllm_omni_sched.video import sandbox
from vllm_omni_sched.video.facts import DeviceRange
from vllm_omni_sched.video.pool import messages
from vllm_omni_sched.video.pool.channel import MAX_BYTES, Channel, close_all, read_all
from vllm_omni_sched.video.pool.messages import Failure

if TYPE_CHECKING:
    from vllm_omni_sched.video.decoders.base import Decoder

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class Worker:
    """Serves tasks; the packets of the video that its owner has sent last are mapped.

    Args:
        channel: channel to the owner.
        decoder: decoder of this process.
        read_index: reads a file's index from its descriptor, under limits; returns the index, and the descriptor of
            a new memory file with the packets if they are not in the file.
        frames: mapped memory of all frames.
    """

    def __init__(self, channel: Channel, decoder: Decoder, read_index: Callable[..., Any], frames: mmap.mmap) -> None:
        self._channel, self._decoder, self._read_index, self._frames = channel, decoder, read_index, frames
        self._packets: mmap.mmap | None = None
        self._slots, self._slot_bytes = 0, 0  # offset of the open video's slots, and the size of one
        self._open_failure: tuple[Failure, str] | None = None  # why the last video could not be opened

    def serve(self) -> None:
        """Serve tasks until the owner closes the channel."""
        while True:
            try:
                received = self._channel.receive(wait=True)
            except EOFError:
                return
            assert received is not None
            message, fds = received
            try:
                self._serve(message, fds)
            except OSError:  # the owner has closed the channel
                return
            finally:
                close_all(fds)

    def _serve(self, message: Any, fds: Sequence[int]) -> None:
        if isinstance(message, messages.Open):
            self._open_failure = self._open(message, fds)
            return
        if isinstance(message, messages.Close):
            self._close()
            return_free_memory()
            return
        out: list[int] = []
        try:
            answer: Any = self._index(message, fds[0], out) if fds else self._decode(message)
        except VideoLimitError as error:
            answer = messages.Failed(message.task, Failure.LIMIT, str(error))
        except VideoInputError as error:
            answer = messages.Failed(message.task, Failure.INPUT, str(error))
        except DecoderError as error:
            answer = messages.Failed(message.task, Failure.DECODER, str(error))
        except MemoryError:
            answer = messages.Failed(message.task, Failure.MEMORY, "")
        except Exception as error:  # noqa: BLE001 - any error is reported to the owner
            answer = messages.Failed(message.task, Failure.INTERNAL, f"{type(error).__name__}: {error}")
        try:
            self._channel.send(answer, out, wait=True)
        finally:
            close_all(out)

    def _index(self, message: messages.Index, fd: int, out: list[int]) -> messages.Indexed:
        began = monotonic_seconds()
        index, packets = self._read_index(fd, message.limits)
        if packets is not None:
            out.append(packets)
        return messages.Indexed(message.task, msgspec.Raw(messages.encode_index(index)), monotonic_seconds() - began)

    def _open(self, message: messages.Open, fds: Sequence[int]) -> tuple[Failure, str] | None:
        self._close()
        packets, index = fds
        try:
            nbytes = os.fstat(packets).st_size
            self._packets = mmap.mmap(packets, nbytes, prot=mmap.PROT_READ)
            known = messages.decode_index(read_all(index, MAX_BYTES))
            self._slots, self._slot_bytes = message.start, 0 if message.on_device else known.width * known.height * 3
            frames = memoryview(self._frames)[message.start : message.start + message.nbytes]
            room: memoryview | DeviceRange = DeviceRange(message.start, message.nbytes) if message.on_device else frames
            self._decoder.open(known, memoryview(self._packets), room)
        except MemoryError:
            return Failure.MEMORY, ""
        except DecoderError as error:
            return Failure.DECODER, str(error)
        except Exception as error:  # noqa: BLE001 - torch raises RuntimeError; another kind of decoder may open the video
            return Failure.DECODER, f"{type(error).__name__}: {error}"
        return None

    def _decode(self, message: messages.Decode) -> messages.Done | messages.Failed:
        if self._open_failure is not None:
            return messages.Failed(message.task, *self._open_failure)
        piece = messages.decode_piece(message.piece)
        began = monotonic_seconds()
        self._allocate_slots(sorted({one.slot for one in piece.wanted}))
        seconds = monotonic_seconds() - began
        result = self._decoder.decode(piece)
        return messages.Done(message.task, replace(result, convert_seconds=result.convert_seconds + seconds))

    def _allocate_slots(self, slots: Sequence[int]) -> None:
        """Allocate the memory of these slots in one go: a quarter cheaper than page by page while writing."""
        for slot in slots:
            start = self._slots + slot * self._slot_bytes
            stop = min(start + self._slot_bytes, len(self._frames))
            start -= start % mmap.PAGESIZE
            if 0 <= start < stop:
                with contextlib.suppress(OSError):  # older kernels allocate pages as they are written
                    self._frames.madvise(_POPULATE_WRITE, start, stop - start)

    def _close(self) -> None:
        self._decoder.close()
        if self._packets is not None:
            with contextlib.suppress(BufferError):  # freed with the last view of it
                self._packets.close()
            self._packets = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the codecs, enter the sandbox, and serve tasks."""
    parser = argparse.ArgumentParser(description="A decoder process; its owner starts it.")
    for name in ("socket", "frames", "parent", "device", "device-frames", "memory-bytes", "file-bytes", "nice"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--profile", type=sandbox.Profile, required=True)
    parser.add_argument("--decoder", required=True, help="module:name of what makes the decoder")
    parser.add_argument("--index", required=True, help="module:name of what reads an index")
    given = parser.parse_args(arguments)
    sandbox.die_with_parent(given.parent)
    sys.path[:] = [
        path for path in sys.path if path not in ("", "/")
    ]  # the working directory must not be imported from
    channel = Channel(socket.socket(fileno=given.socket), messages.from_owner)
    try:
        os.nice(given.nice)
        keep_freed_memory()
        frames = mmap.mmap(given.frames, 0)
        os.close(given.frames)
        if _HUGE_PAGES is not None:
            with contextlib.suppress(OSError):
                frames.madvise(_HUGE_PAGES)
        decoder = _imported(given.decoder)(*([given.device] if given.device >= 0 else []))
        read_index = _imported(given.index)
        link_bytes_per_second = _frames_on_device(decoder, given.device_frames) if given.device_frames >= 0 else 0.0
        missing = sandbox.enter(given.profile, memory_bytes=given.memory_bytes, file_bytes=given.file_bytes)
    except Exception as error:  # noqa: BLE001 - any error is reported to the owner
        channel.send(messages.Failed(0, Failure.START, f"{type(error).__name__}: {error}"), wait=True)
        return
    channel.send(messages.Ready(tuple(part.value for part in missing), link_bytes_per_second), wait=True)
    Worker(channel, decoder, read_index, frames).serve()


def _frames_on_device(decoder: Decoder, fd: int) -> float:
    """Map the memory of frames on a device; return the speed of copies into it, 0.0 if it is out of reach."""
    shared = read_all(fd, MAX_BYTES)
    os.close(fd)
    try:
        return decoder.map_device_frames(shared)
    except (DecoderError, RuntimeError, OSError, ValueError):
        return 0.0


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    main()
