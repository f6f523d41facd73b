"""A received message, and the decoding of its payload into views of its buffers."""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.config.errors import ConnectorError, CorruptMessageError
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing.message import (
    BYTES,
    CHECKED,
    CHECKSUM,
    HEAD,
    HERE,
    IMAGE,
    MAGIC,
    NDARRAY,
    ON_DEVICE,
    PACKED,
    PLACE,
    REVIVE,
    TENSOR,
    VALUE,
    VERSION,
    Hook,
    Message,
    unpacked,
)

UNREADABLE = (
    *(msgspec.DecodeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(MemoryError, SyntaxError, struct.error),  # raised by NumPy for an invalid dtype
)
Place = tuple[Any, int, int]
"""A buffer: the object that holds it, its offset and its size in bytes."""


class Opener:
    """Reusable msgpack decoder: creating one takes longer than decoding most bodies."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._from_extension).decode

    def open(self, body: Any, places: list[Place]) -> Any:
        """Return the payload.

        Raises:
            CorruptMessageError: the body cannot be decoded.
        """
        self._places = places
        try:
            return self._decode(body)
        except CorruptMessageError:
            raise
        except UNREADABLE as error:
            raise CorruptMessageError(f"the body of a message cannot be read: {error}") from error
        finally:
            self._places = []

    def _from_extension(self, code: int, data: memoryview) -> Any:
        if code == BYTES:
            source, at, nbytes = self._places[unpacked(data)]
            return bytes(memoryview(source)[at : at + nbytes])
        which, length = VALUE.unpack_from(data)
        start = VALUE.size + length
        described = bytes(data[VALUE.size : start])
        if which == HERE:
            source, at, nbytes = bytearray(data[start:]), 0, len(data) - start
        else:
            source, at, nbytes = self._places[which]
        if code == TENSOR:
            dtype, shape, expected = _tensor_like(described)
            if nbytes != expected:
                raise CorruptMessageError(f"a message says that {nbytes} bytes have the shape {shape}")
            torch = sys.modules["torch"]
            if isinstance(source, torch.Tensor):  # a block on a device
                return source[at : at + nbytes].view(dtype).view(shape)
            if not nbytes:
                return torch.empty(shape, dtype=dtype)
            flat = torch.frombuffer(source, dtype=dtype, count=nbytes // dtype.itemsize, offset=at)
            return flat if len(shape) == 1 else flat.view(*shape) if shape else flat.as_strided((), ())
        kind, shape = unpacked(described)
        if code == NDARRAY:
            dtype = np.dtype(kind)
            _check(shape, dtype.itemsize, nbytes)
            return np.frombuffer(source, dtype, nbytes // (dtype.itemsize or 1), at).reshape(shape)
        if code == IMAGE:
            from PIL import Image

            return Image.frombuffer(kind, tuple(shape), bytes(memoryview(source)[at : at + nbytes]), "raw", kind, 0, 1)
        raise CorruptMessageError(f"a message holds an extension of unknown kind {code}")


@lru_cache(maxsize=4096)
def _tensor_like(described: bytes) -> tuple[Any, list[int], int]:
    """Return dtype, shape and size in bytes of all tensors with this description."""
    import torch

    name, shape = unpacked(described)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptMessageError(f"a message holds a tensor of unknown dtype {name!r}")
    if min(shape, default=0) < 0:
        raise CorruptMessageError(f"a message holds a tensor of shape {shape}")
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _check(shape: list[int], itemsize: int, nbytes: int) -> None:
    if min(shape, default=0) < 0 or math.prod(shape) * itemsize != nbytes:
        raise CorruptMessageError(f"a message says that {nbytes} bytes have the shape {shape}")


_openers: list[Opener] = []  # unused decoders: several threads may open messages at once
Unpack = Callable[[str, memoryview, str, tuple[int, ...], np.ndarray], None]
"""``unpack(codec, data, dtype, shape, out)`` writes a compressed buffer into ``out``, shape (nbytes,), uint8."""


def flags_of(data: Any) -> int:
    """Return the flags of a message that is not checked yet; 0 if it is too short."""
    return int(HEAD.unpack_from(data)[3]) if len(data) >= HEAD.size else 0


Front = tuple[int, int, int, int, int, int, list[tuple[int, int]]]
"""A checked front: flags, generation, bytes in all, checksum of the buffers, start and end of the body, places."""


def front_of(view: memoryview, name: bytes | None, generation: int | None) -> Front:
    """Return the front of a message.

    Raises:
        CorruptMessageError: the message is cut off, its front is damaged, or it is not the requested one.
    """
    if len(view) < HEAD.size:
        raise CorruptMessageError(f"a message of {len(view)} bytes is shorter than its header")
    checksum, magic, version, flags, in_name, in_body, count, made, total, of_buffers = HEAD.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise CorruptMessageError(f"not a message of version {VERSION} (magic {magic:#x}, version {version})")
    start = HEAD.size + PLACE.size * count  # of the name
    end = start + in_name + in_body
    if not end <= total <= len(view):
        raise CorruptMessageError(f"a message says it has {total} bytes, {end} in front; here are {len(view)}")
    if zlib.crc32(view[CHECKSUM.size : end]) != checksum:
        raise CorruptMessageError("the checksum of a message does not fit its front")
    if generation is not None and made != generation:
        raise CorruptMessageError(f"found a message of generation {made} in place of generation {generation}")
    if name is not None and view[start : start + in_name] != name:
        raise CorruptMessageError("found a message with another key in place of this one")
    places = []
    for place in range(count):
        at, nbytes = PLACE.unpack_from(view, HEAD.size + PLACE.size * place)
        if at + nbytes > total or at < end:
            raise CorruptMessageError("a buffer lies outside its message")
        places.append((at, nbytes))
    return flags, made, total, of_buffers, start + in_name, end, places


class Arrival:
    """A received message whose front was checked by its checksum; its buffers, too, if they have one.

    Args:
        data: the message, or more; its tensors and arrays will be views of it.
        name, generation: what the message must say of itself; None: anything.
        put_at: in seconds of this host's monotonic clock, where the transport knows it.
        copied: the message is a copy of one that was checked: its buffers are not checked again.

    Raises:
        CorruptMessageError: the message is cut off, damaged, or not the requested one.
    """

    def __init__(
        self,
        data: Any,
        name: bytes | None = None,
        generation: int | None = None,
        put_at: float | None = None,
        copied: bool = False,
    ) -> None:
        view = memoryview(data)
        flags, made, total, of_buffers, start, end, places = front_of(view, name, generation)
        self._places: list[Place] = [(data, at, nbytes) for at, nbytes in places] if places else []
        if flags & CHECKED and not copied:
            found = 0
            for _, at, nbytes in self._places:
                found = zlib.crc32(view[at : at + nbytes], found)
            if found != of_buffers:
                raise CorruptMessageError(
                    f"the checksum of a message does not fit its buffers: some of {total} bytes were altered on the way"
                )
        self._data = data
        self._body: Any = view[start:end]
        self.flags = flags & ~CHECKED  # which each transport decides anew
        self.nbytes: int = total
        self.generation: int = made
        self.put_at = put_at if put_at is not None and 0 <= put_at < math.inf else None  # otherwise it is damaged

    def unpack(self, unpack: Unpack) -> None:
        """Decompress compressed buffers into memory of their own; call it before `open`.

        Raises:
            CorruptMessageError: the body is damaged.
            CompressionError: see `Compressor.decompress`.
        """
        if not self.flags & PACKED:
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
        self._body, self.flags = body, self.flags & ~PACKED

    def fetch(self, fetch: Callable[[bytes, Any], Any]) -> None:
        """Open the blocks of buffers on devices; call it before `open`.

        Args:
            fetch: opens the block of a handle: a tensor or array, shape (nbytes,), uint8. Its second argument must be
                held as long as the block is used.

        Raises:
            CorruptMessageError: the body is damaged.
            ConnectorError: what ``fetch`` raises.
        """
        if not self.flags & ON_DEVICE:
            return
        try:
            described, body = unpacked(self._body)
            for handle, entries in described:
                block = fetch(handle, self._data)
                for place, at, nbytes in entries:
                    if not 0 <= at <= at + nbytes <= block.nbytes:
                        raise CorruptMessageError("a buffer lies outside its block on a device")
                    self._places[place] = (block, at, nbytes)
        except ConnectorError:
            raise
        except UNREADABLE as error:
            raise CorruptMessageError(f"the handles of a message cannot be read: {error}") from error
        self._body, self.flags = body, self.flags & ~ON_DEVICE

    def parts(self) -> tuple[bytes, list[np.ndarray]]:
        """Return the body, and the buffers as they are: views, uint8, shape (nbytes,)."""
        buffers = [np.frombuffer(data, np.uint8, nbytes, at) for data, at, nbytes in self._places]
        return bytes(self._body), buffers

    def open(self, revive: Hook | None = None) -> Any:
        """Return the payload.

        Args:
            revive: applied to payloads whose sender asked for it.

        Raises:
            CorruptMessageError: the body is damaged, or still compressed or on a device.
        """
        if self.flags & PACKED:
            raise CorruptMessageError("a compressed message came by a transport that does not compress")
        if self.flags & ON_DEVICE:
            raise CorruptMessageError("a message with device tensors came by a transport that opens none")
        try:
            opener = _openers.pop()
        except IndexError:
            opener = Opener()
        payload = opener.open(self._body, self._places)
        _openers.append(opener)
        return revive(payload) if revive is not None and self.flags & REVIVE else payload


def message_of(arrival: Arrival, edge: Edge, key: str) -> Message:
    """Return a received message as one to be sent again; nothing is decoded, and the buffers are not copied."""
    body, buffers = arrival.parts()
    message = Message(edge, key, body, buffers, ("uint8", 1) if buffers else None)
    message.flags = arrival.flags
    return message
