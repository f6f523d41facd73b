"""Messages between the owner of decoders and their processes."""

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
from vllm_omni_sched.video.options import Limits


class Failure(str, Enum):
    """Classifies why a task failed."""

    INPUT = "input"  # the video cannot be read
    LIMIT = "limit"  # the video exceeds the limits of the options
    DECODER = "decoder"  # this kind of decoder cannot decode it
    MEMORY = "memory"  # it needs more memory than a decoder may have
    INTERNAL = "internal"  # the decoder has an internal error
    START = "start"  # the process cannot work at all


class Index(msgspec.Struct, tag=True, frozen=True):
    """Index a video. Descriptor: the file."""

    task: int
    limits: Limits


class Open(msgspec.Struct, tag=True, frozen=True):
    """Open the video of the next pieces; no answer. Descriptors: the packets' bytes, and the result of `encode_index`.

    ``start``, ``nbytes``: range of its frames in the memory of all frames; ``on_device``: in that of a device.
    """

    start: int
    nbytes: int
    on_device: bool = False


class Decode(msgspec.Struct, tag=True, frozen=True):
    """Decode a piece of the open video; ``piece`` is a result of `encode_piece`."""

    task: int
    piece: msgspec.Raw


class Close(msgspec.Struct, tag=True, frozen=True):
    """Close the open video; no answer."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The process waits for tasks.

    ``missing``: parts of the sandbox that this system does not have.
    ``link_bytes_per_second``: measured speed of its device's copies into the memory of frames on a device; 0.0 if it
    does not reach that memory, or there is none.
    """

    missing: tuple[str, ...] = ()
    link_bytes_per_second: float = 0.0


class Indexed(msgspec.Struct, tag=True, frozen=True):
    """Reports an index, encoded by `encode_index`. Descriptor: the packets' bytes, if they are not in the file."""

    task: int
    index: msgspec.Raw
    seconds: float


class Done(msgspec.Struct, tag=True, frozen=True):
    """Reports a piece's result."""

    task: int
    result: PieceResult


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Reports that a task failed, with the reason as text."""

    task: int
    failure: Failure
    message: str


ToWorker = Index | Open | Decode | Close
ToOwner = Ready | Indexed | Done | Failed

from_owner: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToOwner)


class _Bytes:
    """Stands for numpy's arrays in type hints, because they are sent as bytes."""

    def __class_getitem__(cls, _: Any) -> Any:
        return bytes


_ARRAYS = {"packets": PACKET, "feed": np.dtype("<i4")}


def _struct_of(kind: type) -> Any:
    """Return a struct with the fields of a dataclass of facts."""
    hints = typing.get_type_hints(kind, {**vars(facts), "npt": SimpleNamespace(NDArray=_Bytes)})
    return msgspec.defstruct(kind.__name__, [(field.name, hints[field.name]) for field in fields(kind)])


_INDEX, _PIECE = _struct_of(VideoIndex), _struct_of(Piece)
_index_decoder, _piece_decoder = msgspec.msgpack.Decoder(_INDEX), msgspec.msgpack.Decoder(_PIECE)


def encode_index(index: VideoIndex) -> bytes:
    """Encode an index."""
    return _encode(_INDEX, index)


def decode_index(data: bytes | msgspec.Raw) -> VideoIndex:
    """Decode an index.

    Raises:
        ValueError: the data is not an index.
    """
    return VideoIndex(**_decode(_index_decoder.decode(data)))


def encode_piece(piece: Piece) -> bytes:
    """Encode a piece."""
    return _encode(_PIECE, piece)


def decode_piece(data: bytes | msgspec.Raw) -> Piece:
    """Decode a piece.

    Raises:
        ValueError: the data is not a piece.
    """
    return Piece(**_decode(_piece_decoder.decode(data)))


def _encode(kind: Any, value: Any) -> bytes:
    values = {name: getattr(value, name) for name in kind.__struct_fields__}
    for name, dtype in _ARRAYS.items():
        if name in values:
            values[name] = np.ascontiguousarray(values[name], dtype).tobytes()
    return msgspec.msgpack.encode(kind(**values))


def _decode(struct: Any) -> dict[str, Any]:
    values = {name: getattr(struct, name) for name in struct.__struct_fields__}
    for name, dtype in _ARRAYS.items():
        if name in values:
            values[name] = np.frombuffer(values[name], dtype)
    return values
