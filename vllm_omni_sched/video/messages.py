"""What the owner of decoders and their processes tell each other."""

from __future__ import annotations

import typing
from dataclasses import fields
from enum import Enum
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.video import facts
from vllm_omni_sched.video.facts import PACKET, Piece, PieceResult, VideoIndex
from vllm_omni_sched.video.limits import Limits


class Failure(str, Enum):
    """Why a task came to nothing."""

    INPUT = "input"  # the video cannot be read
    LIMIT = "limit"  # it is more than the options allow
    DECODER = "decoder"  # this kind of decoder cannot decode it
    MEMORY = "memory"  # it needs more memory than a decoder may have
    INTERNAL = "internal"  # the decoder itself is wrong
    START = "start"  # the process cannot work at all


class Index(msgspec.Struct, tag=True, frozen=True):
    """Index a video. Descriptor: the file."""

    task: int
    limits: Limits


class Open(msgspec.Struct, tag=True, frozen=True):
    """Pieces of this video come next; no answer. Descriptors: the packets' bytes, and what `index_out` gave.

    ``start``, ``nbytes``: its frames, in the memory of all frames.
    """

    video: int
    start: int
    nbytes: int


class Decode(msgspec.Struct, tag=True, frozen=True):
    """Decode a piece of the video that is open; what `piece_out` gave."""

    task: int
    piece: msgspec.Raw


class Close(msgspec.Struct, tag=True, frozen=True):
    """Let go of the video that is open; no answer."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The process waits for tasks; which parts of the sandbox this system does not have."""

    missing: tuple[str, ...] = ()


class Indexed(msgspec.Struct, tag=True, frozen=True):
    """A video's index, as `index_out` gave it. Descriptor: the packets' bytes, where they are not the file's."""

    task: int
    index: msgspec.Raw
    seconds: float


class Done(msgspec.Struct, tag=True, frozen=True):
    """A piece's result."""

    task: int
    result: PieceResult


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A task came to nothing, and why, for people."""

    task: int
    failure: Failure
    message: str


ToWorker = Index | Open | Decode | Close
ToOwner = Ready | Indexed | Done | Failed

to_worker: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToWorker)
to_owner: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToOwner)


class _Bytes:
    """Stands for numpy's arrays in type hints: they travel as bytes."""

    def __class_getitem__(cls, _: Any) -> Any:
        return bytes


_ARRAYS = {"packets": PACKET, "feed": np.dtype("<i4")}


def _travelling(kind: type) -> Any:
    """A struct with the fields of a dataclass of facts."""
    hints = typing.get_type_hints(kind, {**vars(facts), "npt": SimpleNamespace(NDArray=_Bytes)})
    return msgspec.defstruct(kind.__name__, [(field.name, hints[field.name]) for field in fields(kind)])


_INDEX, _PIECE = _travelling(VideoIndex), _travelling(Piece)
_index_decoder, _piece_decoder = msgspec.msgpack.Decoder(_INDEX), msgspec.msgpack.Decoder(_PIECE)


def index_out(index: VideoIndex) -> bytes:
    """An index as bytes."""
    return _out(_INDEX, index)


def index_in(data: bytes | msgspec.Raw) -> VideoIndex:
    """Back again.

    Raises:
        ValueError: it is none.
    """
    return VideoIndex(**_in(_index_decoder.decode(data)))


def piece_out(piece: Piece) -> bytes:
    """A piece as bytes."""
    return _out(_PIECE, piece)


def piece_in(data: bytes | msgspec.Raw) -> Piece:
    """Back again.

    Raises:
        ValueError: it is none.
    """
    return Piece(**_in(_piece_decoder.decode(data)))


def _out(kind: Any, value: Any) -> bytes:
    there = {name: getattr(value, name) for name in kind.__struct_fields__}
    for name, dtype in _ARRAYS.items():
        if name in there:
            there[name] = np.ascontiguousarray(there[name], dtype).tobytes()
    return msgspec.msgpack.encode(kind(**there))


def _in(struct: Any) -> dict[str, Any]:
    there = {name: getattr(struct, name) for name in struct.__struct_fields__}
    for name, dtype in _ARRAYS.items():
        if name in there:
            there[name] = np.frombuffer(there[name], dtype)
    return there
