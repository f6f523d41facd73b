"""A payload as one flat message: a checked header, a msgpack body, and raw aligned buffers. Nothing is pickled.

::

    0   checksum of all up to the buffers but itself, magic, version, flags, generation,
        bytes of name, bytes of body, number of buffers, bytes in all
    40  where each buffer lies: offset, bytes (16 each)
    …   name (edge and key)
    …   body: msgpack, in which an array is an extension: its place in the table, dtype, shape
    …   the buffers, each at a multiple of 64

Arrays and tensors are copied once, from where they are (a device, too) to where the message is written, and come out as
views of the message. Everything else goes through msgspec as in vLLM-Omni's own serializer, so that a payload arrives
as the same dicts, whatever connector carried it.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vllm_omni_sched.connectors.base import Edge, name_of
from vllm_omni_sched.errors import CorruptMessageError, PayloadError

if TYPE_CHECKING:
    import torch

MAGIC, VERSION = 0x31534F56, 1  # "VOS1"
ALIGNMENT = 64
_HEAD = struct.Struct("<IIHHIIIQQ")
_CHECKSUM = struct.Struct("<I")
_PLACE = struct.Struct("<QQ")
_UNREADABLE = (
    *(msgspec.DecodeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(MemoryError, SyntaxError),  # of NumPy, when it is asked for a dtype that is none
)
REVIVE, PACKED = 1, 2
"""Flags: the receiver makes objects of some dicts again, with a hook that it is given; some buffers are compressed."""

_TENSOR, _NDARRAY, _IMAGE, _BYTES = 1, 2, 3, 4
_packed = msgspec.msgpack.Encoder().encode
_unpacked = msgspec.msgpack.Decoder().decode

Hook = Callable[[Any], Any]
Unpack = Callable[[str, memoryview, str, tuple[int, ...], np.ndarray], Any]
"""``unpack(codec, data, dtype, shape, out)`` writes a compressed buffer into ``out``, shape (nbytes,), uint8."""
Buffer = bytearray | memoryview
"""Memory that can be written to, in single bytes."""


class Message:
    """A payload on its way from stage to stage, not yet written anywhere.

    Attributes:
        body: msgpack of all but the buffers.
        buffers: arrays and tensors.
        flags: `REVIVE`, `PACKED`.
        nbytes: of the message when written.
        payload_bytes: of its buffers alone.
        longest: dtype and number of dimensions of its longest buffer; None without one.
    """

    def __init__(self, edge: Edge, key: str, body: bytes, buffers: list[Any]) -> None:
        self.edge, self.key, self.name = edge, key, name_of(edge, key)
        self.body, self.buffers = body, buffers
        self.flags = 0
        self._places: list[tuple[int, int]] = []
        self.payload_bytes = longest = 0
        self.longest: tuple[str, int] | None = None
        at = _HEAD.size + _PLACE.size * len(buffers) + len(self.name) + len(body)
        for buffer in buffers:
            nbytes = int(buffer.nbytes)
            at = -(-at // ALIGNMENT) * ALIGNMENT
            self._places.append((at, nbytes))
            at += nbytes
            self.payload_bytes += nbytes
            if nbytes > longest:
                longest, self.longest = nbytes, (_dtype_name(buffer.dtype), buffer.ndim)
        self.nbytes = at

    def write_to(self, target: memoryview, address: int, generation: int = 0) -> None:
        """Write it; each buffer is copied once.

        Args:
            target: memory of at least `nbytes` bytes, format "B".
            address: of the first byte of ``target``.
            generation: what the receiver may ask for.

        Raises:
            ValueError: ``target`` is too short.
        """
        if len(target) < self.nbytes:
            raise ValueError(f"a message of {self.nbytes} bytes does not fit into {len(target)}")
        name, body, places = self.name, self.body, self._places
        head = _HEAD.pack(0, MAGIC, VERSION, self.flags, generation, len(name), len(body), len(places), self.nbytes)
        front = b"".join((head[_CHECKSUM.size :], *[_PLACE.pack(*place) for place in places], name, body))
        target[: _CHECKSUM.size] = _CHECKSUM.pack(zlib.crc32(front))
        target[_CHECKSUM.size : _CHECKSUM.size + len(front)] = front
        for (at, nbytes), buffer in zip(self._places, self.buffers, strict=True):
            if nbytes:
                _copy(buffer, target, at, address + at)

    def to_buffer(self) -> bytearray:
        """The message in memory of its own."""
        written = bytearray(self.nbytes)
        self.write_to(memoryview(written), ctypes.addressof(ctypes.c_char.from_buffer(written)))
        return written


def make_message(edge: Edge, key: str, payload: Any, fallback: Hook | None = None) -> Message:
    """Take a payload apart.

    Args:
        fallback: makes plain data of objects that msgspec does not know.

    Raises:
        PayloadError: something in it cannot be sent.
    """
    buffers: list[Any] = []

    def hook(value: Any) -> Any:
        extension = _as_extension(value, buffers)
        if extension is not None:
            return extension
        if fallback is None:
            raise PayloadError(
                f"a {type(value).__name__} cannot be sent: tensors, arrays, images and plain data (dict, list, str, "
                "int, float, bool, None, bytes, dataclasses, msgspec structs) can"
            )
        return fallback(value)

    if isinstance(payload, (bytes, bytearray, memoryview)):  # msgpack would copy these into the body
        if isinstance(payload, memoryview) and not payload.c_contiguous:
            payload = payload.tobytes()
        buffers.append(np.frombuffer(payload, np.uint8))
        payload = msgspec.msgpack.Ext(_BYTES, _packed(0))
    try:
        body = msgspec.msgpack.Encoder(enc_hook=hook).encode(payload)
    except PayloadError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
        raise PayloadError(f"the payload cannot be sent: {error}") from error
    return Message(edge, key, body, buffers)


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
        if len(view) < _HEAD.size:
            raise CorruptMessageError(f"a message of {len(view)} bytes is shorter than its header")
        checksum, magic, version, flags, made, in_name, in_body, count, total = _HEAD.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise CorruptMessageError(f"not a message of version {VERSION} (magic {magic:#x}, version {version})")
        start = _HEAD.size + _PLACE.size * count  # of the name
        end = start + in_name + in_body
        if not end <= total <= len(view):
            raise CorruptMessageError(f"a message says it has {total} bytes, {end} in front; here are {len(view)}")
        if zlib.crc32(view[_CHECKSUM.size : end]) != checksum:
            raise CorruptMessageError("the checksum of a message does not fit its front")
        if generation is not None and made != generation:
            raise CorruptMessageError(f"a message of generation {made} lies where generation {generation} should be")
        if name is not None and view[start : start + in_name] != name:
            raise CorruptMessageError("a message with another key lies where this one should be")
        self._places: list[tuple[Any, int, int]] = []
        for place in range(count):
            at, nbytes = _PLACE.unpack_from(view, _HEAD.size + _PLACE.size * place)
            if at + nbytes > total or at < end:
                raise CorruptMessageError("a buffer lies outside its message")
            self._places.append((data, at, nbytes))
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
            entries, body = _unpacked(self._body)
            for place, (codec, dtype, shape, raw_bytes) in entries:
                data, at, nbytes = self._places[place]
                out = np.empty(raw_bytes, np.uint8)
                unpack(codec, memoryview(data)[at : at + nbytes], dtype, tuple(shape), out)
                self._places[place] = (out, 0, raw_bytes)
        except _UNREADABLE as error:
            raise CorruptMessageError(f"a compressed message cannot be read: {error}") from error
        self._body, self._flags = body, self._flags & ~PACKED

    def open(self, revive: Hook | None = None) -> Any:
        """The payload.

        Args:
            revive: applied to payloads whose sender asked for it.

        Raises:
            CorruptMessageError: the body is damaged, or compressed still.
        """
        if self._flags & PACKED:
            raise CorruptMessageError("a compressed message came by a path that does not compress")
        try:
            payload = msgspec.msgpack.Decoder(ext_hook=self._from_extension).decode(self._body)
        except CorruptMessageError:
            raise
        except _UNREADABLE as error:
            raise CorruptMessageError(f"the body of a message cannot be read: {error}") from error
        return revive(payload) if revive is not None and self._flags & REVIVE else payload

    def _from_extension(self, code: int, packed: memoryview) -> Any:
        described = _unpacked(packed)
        if code == _BYTES:
            data, at, nbytes = self._places[described]
            return bytes(memoryview(data)[at : at + nbytes])
        which, kind, shape = described
        data, at, nbytes = self._places[which]
        if code == _TENSOR:
            return _tensor(data, at, nbytes, kind, shape)
        if code == _NDARRAY:
            dtype = np.dtype(kind)
            _check(shape, dtype.itemsize, nbytes)
            return np.frombuffer(data, dtype, nbytes // (dtype.itemsize or 1), at).reshape(shape)
        if code == _IMAGE:
            from PIL import Image

            return Image.frombuffer(kind, tuple(shape), bytes(memoryview(data)[at : at + nbytes]), "raw", kind, 0, 1)
        raise CorruptMessageError(f"a message holds an extension of unknown kind {code}")


def _as_extension(value: Any, buffers: list[Any]) -> msgspec.msgpack.Ext | None:
    torch = sys.modules.get("torch")  # who has a tensor, or an image, has imported what makes them
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
            raise PayloadError(f"a tensor that is {kind} cannot be sent; make it dense first")
        if value.is_meta:
            raise PayloadError("a tensor on the meta device cannot be sent: it has no data")
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        code = _TENSOR
        described: list[Any] = [len(buffers), _dtype_name(value.dtype), tuple(value.shape)]
    elif isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise PayloadError("a masked array cannot be sent; fill it, or send data and mask")
        if value.dtype.hasobject or value.dtype.kind == "V":
            raise PayloadError(f"an array of dtype {value.dtype} cannot be sent")
        code, described = _NDARRAY, [len(buffers), value.dtype.str, list(value.shape)]
    elif isinstance(value, np.generic):
        return _as_extension(np.asarray(value), buffers)
    elif (pil := sys.modules.get("PIL.Image")) is not None and isinstance(value, pil.Image):
        if value.mode in ("1", "P"):  # bits, and indices into a palette, are not rows of bytes
            value = value.convert("L" if value.mode == "1" else "RGBA")
        described = [len(buffers), value.mode, list(value.size)]
        code, value = _IMAGE, np.ascontiguousarray(value)
    else:
        return None
    buffers.append(value)
    return msgspec.msgpack.Ext(code, _packed(described))


@lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


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
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=nbytes // itemsize, offset=at)
    return flat if len(shape) == 1 else flat.view(shape)


def _check(shape: list[int], itemsize: int, nbytes: int) -> None:
    if min(shape, default=0) < 0 or math.prod(shape) * itemsize != nbytes:
        raise CorruptMessageError(f"a message says that {nbytes} bytes have the shape {shape}")


def _copy(source: Any, target: memoryview, at: int, address: int) -> None:
    """Copy an array or tensor to byte ``at`` of ``target``, which is at ``address``."""
    if isinstance(source, np.ndarray):
        if source.flags.c_contiguous:
            ctypes.memmove(address, source.ctypes.data, source.nbytes)
        else:
            np.frombuffer(target, source.dtype, source.size, at).reshape(source.shape)[...] = source
        return
    if source.is_contiguous() and source.device.type == "cpu":
        ctypes.memmove(address, source.data_ptr(), source.nbytes)
        return
    import torch

    flat = torch.frombuffer(target, dtype=source.dtype, count=source.numel(), offset=at)
    flat.view(source.shape).copy_(source.detach())
