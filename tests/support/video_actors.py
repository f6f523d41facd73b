"""Define decoders that do what their video says, in real processes but without a codec, to test faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.config.errors import DecoderError, VideoInputError
from vllm_omni_sched.video.decoders.base import Decoder
from vllm_omni_sched.video.facts import PACKET, PacketFlag, Piece, PieceResult, VideoIndex
from vllm_omni_sched.video.options import Limits
from vllm_omni_sched.video.pool import messages
from vllm_omni_sched.video.pool.kinds import CPU, NO_DEVICE, DecoderKind
from vllm_omni_sched.video.sandbox.seccomp import Profile

READ_INDEX = "tests.support.video_actors:read_index"
GOP = 4
WIDTH, HEIGHT = 8, 6


def kind(number: int = 2, name: str = CPU, decoder: str = "ActingDecoder") -> DecoderKind:
    """Return a kind with so many acting decoders."""
    return DecoderKind(name, f"tests.support.video_actors:{decoder}", Profile.CPU, (NO_DEVICE,) * number)


def video(frames: int = 24, *, index: str = "", padding: int = 0, **acts: list[int]) -> bytes:
    """Return a video that tells its index what to do, and its decoders at which frames; see `ActingDecoder`."""
    return json.dumps({"frames": frames, "index": index, "acts": acts, "padding": "x" * padding}).encode()


def read_index(fd: int, limits: Limits) -> tuple[VideoIndex, None]:
    """Read the index of a scripted video."""
    try:
        script = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    except ValueError:
        raise VideoInputError("no video that can be read") from None
    act(script["index"])
    packets = np.zeros(script["frames"], PACKET)
    packets["pts"] = packets["dts"] = np.arange(len(packets))
    packets["nbytes"] = 1
    packets["flags"][::GOP] = PacketFlag.START
    if script["index"] == "nonsense":
        packets["offset"] = 1 << 40
    said = json.dumps(script["acts"]).encode()
    return VideoIndex("acting", said, WIDTH, HEIGHT, 0, "", (1, 10), 0, 10.0, 0.0, packets, True), None


def say(message: bytes, *fds: int) -> None:
    """Send the owner a message that it has not asked for."""
    number = next(int(one.partition("=")[2]) for one in sys.argv if one.startswith("--socket="))
    with socket.socket(fileno=os.dup(number)) as end:
        socket.send_fds(end, [b"\0" + message], fds)


def act(what: str) -> None:
    """Do something that a decoder should not."""
    if what == "die":
        os._exit(7)
    elif what == "odd_signal":
        signal.pthread_kill(threading.get_ident(), 40)  # a real-time one, without a name
    elif what == "nested":
        say(b"\x84\xa4type\xa7Indexed\xa4task\x01\xa5index" + b"\x91" * 50_000 + b"\xc0\xa7seconds\xc0")
    elif what == "ready_again":
        say(msgspec.msgpack.encode(messages.Ready()), *[os.memfd_create("x") for _ in range(4)])
    elif what == "hang":
        time.sleep(3600)
    elif what == "wrong":
        raise RuntimeError("something is wrong with this decoder")
    elif what == "greedy":
        bytearray(1 << 40)
    elif what == "refuse":
        raise DecoderError("cannot decode such a thing")


def expected(frame: int) -> int:
    """Return the value of each byte of a frame."""
    return frame % 251 + 1


class ActingDecoder(Decoder):
    """Writes `expected` frames; at frames that are listed it acts.

    ``die``, ``hang``, ``wrong``, ``greedy``, ``refuse``: always; ``die_once``: when nobody died of it before;
    ``absent``: the frame does not come out; ``slow``: takes 20 ms.
    """

    def __init__(self) -> None:
        self._acts: dict[str, list[int]] = {}
        self._frames: Any = None

    def open(self, index: VideoIndex, packets: memoryview, frames: memoryview) -> None:
        self._acts = json.loads(index.extradata)
        self._frames = np.frombuffer(frames, np.uint8).reshape(-1, HEIGHT, WIDTH, 3)
        if self._acts.get("refuse_open"):
            raise DecoderError("cannot open such a thing")

    def decode(self, piece: Piece) -> PieceResult:
        found, frames = [], []
        for one in piece.wanted:
            if one.slot in found:
                continue
            acts = [name for name, frames in self._acts.items() if one.frame in frames]
            slot = self._frames[one.slot]
            if "die_once" in acts and slot[0, 0, 0] != 255:
                slot[:] = 255
                act("die")
            for name in acts:
                act(name)
            if "slow" in acts:
                time.sleep(0.02)
            if "absent" not in acts:
                slot[:] = expected(one.frame)
                found.append(one.slot)
                frames.append(one.frame)
        return PieceResult(tuple(found), False, len(piece.feed), 0.0, 0.0, 0, frames=tuple(frames))

    def close(self) -> None:
        self._frames = None


class RefusingDecoder(ActingDecoder):
    """Cannot open anything."""

    def open(self, index: VideoIndex, packets: memoryview, frames: memoryview) -> None:
        raise DecoderError("cannot open this one")


class OutOfMemoryDecoder(ActingDecoder):
    """Opens nothing, and says it as torch does."""

    def open(self, index: VideoIndex, packets: memoryview, frames: memoryview) -> None:
        raise RuntimeError("CUDA error: out of memory")


class DyingDecoder(ActingDecoder):
    """Dies of any piece."""

    def decode(self, piece: Piece) -> PieceResult:
        act("die")
        raise AssertionError


class AbsentDecoder(ActingDecoder):
    """Decoder whose library is missing."""

    def __init__(self) -> None:
        raise ImportError("no such library")
