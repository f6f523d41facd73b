"""A message that has arrived, and its payload."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vllm_omni_sched.connectors.framing.layout import (
    BYTES,
    CHECKSUM,
    HEAD,
    IMAGE,
    MAGIC,
    NDARRAY,
    ON_DEVICE,
    PACKED,
    PLACE,
    REVIVE,
    TENSOR,
    VERSION,
    Hook,
    unpacked,
)
from vllm_omni_sched.connectors.framing.message import Message
from vllm_omni_sched.errors import ConnectorError, CorruptMessageError

if TYPE_CHECKING:
    import torch

    from vllm_omni_sched.connectors.base import Edge

UNREADABLE = (
    *(msgspec.DecodeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(MemoryError, SyntaxError),  # of NumPy, when it is asked for a dtype that is none
)
Unpack = Callable[[str, memoryview, str, tuple[int, ...], np.ndarray], None]
"""``unpack(codec, data, dtype, shape, out)`` writes a compressed buffer into ``out``, shape (nbytes,), uint8."""


def flags_of(data: Any) -> int:
    """Flags of a message that was not looked at; 0 where it is too short to have any."""
    return int(HEAD.unpack_from(data)[3]) if len(data) >= HEAD.size else 0


class Arrival:
    """A message that has arrived, and whose front is proved to be whole.

    Args:
        data: the message, or more; its tensors and arrays will be views of it.
        name, generation: what the message must say of itself; None: anything.

    Raises:
        CorruptMessageError: it is cut off, damaged, or another message than the one asked for.
    """

    def __init__(self, data: Any, name: bytes | None = None, generation: int | None = None) -> None:
        view = memoryview(data)
        if len(view) < HEAD.size:
            raise CorruptMessageError(f"a message of {len(view)} bytes is shorter than its header")
        checksum, magic, version, flags, in_name, in_body, count, made, total = HEAD.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise CorruptMessageError(f"not a message of version {VERSION} (magic {magic:#x}, version {version})")
        start = HEAD.size + PLACE.size * count  # of the name
        end = start + in_name + in_body
        if not end <= total <= len(view):
            raise CorruptMessageError(f"a message says it has {total} bytes, {end} in front; here are {len(view)}")
        if zlib.crc32(view[CHECKSUM.size : end]) != checksum:
            raise CorruptMessageError("the checksum of a message does not fit its front")
        if generation is not None and made != generation:
            raise CorruptMessageError(f"a message of generation {made} lies where generation {generation} should be")
        if name is not None and view[start : start + in_name] != name:
            raise CorruptMessageError("a message with another key lies where this one should be")
        self._places: list[tuple[Any, int, int]] = []
        for place in range(count):
            at, nbytes = PLACE.unpack_from(view, HEAD.size + PLACE.size * place)
            if at + nbytes > total or at < end:
                raise CorruptMessageError("a buffer lies outside its message")
            self._places.append((data, at, nbytes))
        self._data = data
        self._body: Any = view[start + in_name : end]
        self._flags = flags
        self.nbytes: int = total
        self.generation: int = made

    def unpack(self, unpack: Unpack) -> None:
        """Decompress what is compressed, into memory of its own; before `open`.

        Raises:
            CorruptMessageError: the body is damaged.
            CompressionError: see `Compressor.decompress`.
        """
        if not self._flags & PACKED:
            return
        try:
            entries, body = unpacked(self._body)
            for place, (codec, dtype, shape, raw_bytes) in entries:
                data, at, nbytes = self._places[place]
                out = np.empty(raw_bytes, np.uint8)
                unpack(codec, memoryview(data)[at : at + nbytes], dtype, tuple(shape), out)
                self._places[place] = (out, 0, raw_bytes)
        except UNREADABLE as error:
            raise CorruptMessageError(f"a compressed message cannot be read: {error}") from error
        self._body, self._flags = body, self._flags & ~PACKED

    @property
    def is_on_device(self) -> bool:
        """Whether buffers lie on a device still; `fetch` comes before `open` then."""
        return bool(self._flags & ON_DEVICE)

    def fetch(self, fetch: Callable[[bytes, Any], torch.Tensor]) -> None:
        """Open the blocks that hold buffers on devices.

        Args:
            fetch: makes a block, shape (nbytes,), uint8, of its handle, and of what to keep as long as it is looked at.

        Raises:
            CorruptMessageError: the body is damaged.
            ConnectorError: what ``fetch`` raises.
        """
        try:
            described, body = unpacked(self._body)
            for handle, entries in described:
                block = fetch(handle, self._data)
                for place, at, nbytes in entries:
                    if not 0 <= at <= at + nbytes <= block.numel():
                        raise CorruptMessageError("a buffer lies outside its block on a device")
                    self._places[place] = (block, at, nbytes)
        except ConnectorError:
            raise
        except UNREADABLE as error:
            raise CorruptMessageError(f"the handles of a message cannot be read: {error}") from error
        self._body, self._flags = body, self._flags & ~ON_DEVICE

    def open(self, revive: Hook | None = None) -> Any:
        """The payload.

        Args:
            revive: applied to payloads whose sender asked for it.

        Raises:
            CorruptMessageError: the body is damaged, or compressed or on a device still.
        """
        if self._flags & PACKED:
            raise CorruptMessageError("a compressed message came by a path that does not compress")
        if self._flags & ON_DEVICE:
            raise CorruptMessageError("a message with device tensors came by a path that opens none")
        try:
            payload = msgspec.msgpack.Decoder(ext_hook=self._from_extension).decode(self._body)
        except CorruptMessageError:
            raise
        except UNREADABLE as error:
            raise CorruptMessageError(f"the body of a message cannot be read: {error}") from error
        return revive(payload) if revive is not None and self._flags & REVIVE else payload

    def to_message(self, edge: Edge, key: str) -> Message:
        """The same once more, with its buffers as bytes, to be sent on."""
        buffers = [
            np.frombuffer(data, np.uint8, nbytes, at)
            if isinstance(data, (bytes, bytearray, memoryview, np.ndarray))
            else data[at : at + nbytes]
            for data, at, nbytes in self._places
        ]
        message = Message(edge, key, bytes(self._body), buffers)
        message.flags = self._flags
        return message

    def _from_extension(self, code: int, packed: memoryview) -> Any:
        described = unpacked(packed)
        if code == BYTES:
            data, at, nbytes = self._places[described]
            return bytes(memoryview(data)[at : at + nbytes])
        which, kind, shape = described
        data, at, nbytes = self._places[which]
        if code == TENSOR:
            return _tensor(data, at, nbytes, kind, shape)
        if code == NDARRAY:
            dtype = np.dtype(kind)
            _check(shape, dtype.itemsize, nbytes)
            return np.frombuffer(data, dtype, nbytes // (dtype.itemsize or 1), at).reshape(shape)
        if code == IMAGE:
            from PIL import Image

            return Image.frombuffer(kind, tuple(shape), bytes(memoryview(data)[at : at + nbytes]), "raw", kind, 0, 1)
        raise CorruptMessageError(f"a message holds an extension of unknown kind {code}")


@lru_cache(maxsize=256)
def _torch_dtype(name: str) -> tuple[Any, int]:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptMessageError(f"a message holds a tensor of unknown dtype {name!r}")
    return dtype, dtype.itemsize


def _tensor(data: Any, at: int, nbytes: int, kind: str, shape: list[int]) -> torch.Tensor:
    dtype, itemsize = _torch_dtype(kind)
    _check(shape, itemsize, nbytes)
    torch = sys.modules["torch"]
    if isinstance(data, torch.Tensor):
        return data[at : at + nbytes].view(dtype).view(shape)
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=nbytes // itemsize, offset=at)
    return flat if len(shape) == 1 else flat.view(shape)


def _check(shape: list[int], itemsize: int, nbytes: int) -> None:
    if min(shape, default=0) < 0 or math.prod(shape) * itemsize != nbytes:
        raise CorruptMessageError(f"a message says that {nbytes} bytes have the shape {shape}")
