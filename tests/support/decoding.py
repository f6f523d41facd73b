"""Decode with a plain decoder (the whole file, in sequence, in one thread), and with ours in this process."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import av
import numpy as np

from tests.support.clips import clip
from vllm_omni_sched.video.decoders.base import Decoder
from vllm_omni_sched.video.decoders.convert import Converter
from vllm_omni_sched.video.decoders.pyav import PyAvDecoder, output_size
from vllm_omni_sched.video.demux import read_index
from vllm_omni_sched.video.facts import Piece, PieceResult, VideoIndex
from vllm_omni_sched.video.plan import plan
from vllm_omni_sched.video.repair import Repair, repair


@dataclass(frozen=True)
class Video:
    """Holds an indexed clip, and the bytes of its packets."""

    index: VideoIndex
    packets: bytes


@contextmanager
def as_file(data: bytes) -> Iterator[int]:
    """Open a memfd with these bytes."""
    fd = os.memfd_create("clip")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


def index_of(data: bytes) -> Video:
    with as_file(data) as fd:
        index, packets_fd = read_index(fd)
    if packets_fd is None:
        return Video(index, data)
    with os.fdopen(packets_fd, "rb") as file:
        file.seek(0)
        return Video(index, file.read())


@functools.cache
def video(name: str) -> Video:
    return index_of(clip(name))


@functools.cache
def plain(name: str) -> tuple[tuple[int | None, np.ndarray], ...]:
    """Return what a plain decoder makes of a clip: pts and picture of each frame, in its order."""
    size = output_size(video(name).index)
    converter, rotation = Converter(), video(name).index.rotation
    frames = []
    with av.open(io.BytesIO(clip(name))) as file:
        stream = file.streams.video[0]
        stream.codec_context.thread_count = 1
        for packet in _packets(file, stream):
            try:
                decoded = packet.decode()
            except av.FFmpegError:
                continue
            for frame in decoded:
                picture = np.empty((*size, 3), np.uint8)
                converter.convert(frame, picture, rotation)
                frames.append((frame.pts, picture))
    return tuple(frames)


def _packets(file: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.Packet]:
    try:
        yield from file.demux(stream)
    except av.FFmpegError:
        return


@dataclass
class Outcome:
    """Result of decoding a clip with our code."""

    frames: dict[int, np.ndarray]  # by number in display order
    pieces: list[tuple[Piece, PieceResult]] = field(default_factory=list)
    repair: Repair | None = None

    @property
    def decoded(self) -> int:
        return sum(result.decoded for _, result in self.pieces)


def ours(source: Video, numbers: Sequence[int], *, decoder: Decoder | None = None, decoders=2, threads=1) -> Outcome:
    """Index, plan, decode, repair."""
    decoder = decoder or PyAvDecoder()
    numbers = sorted(set(numbers))
    height, width = output_size(source.index)
    output = np.zeros((len(numbers), height, width, 3), np.uint8)
    decoder.open(source.index, memoryview(source.packets), memoryview(output).cast("B"))
    pieces = [replace(piece, threads=threads) for piece in plan(source.index, numbers, decoders).pieces]
    done = [(piece, decoder.decode(piece)) for piece in pieces]
    found = {slot for _, result in done for slot in result.found}
    again = repair(source.index, done)
    if again is not None:
        found -= {one.slot for one in again.piece.wanted}
        result = decoder.decode(again.piece)
        found |= set(result.found)
        done.append((again.piece, result))
    frames = {numbers[slot]: output[slot].copy() for slot in found}
    decoder.close()
    return Outcome(frames, done, again)
