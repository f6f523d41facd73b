"""A payload as one flat message: a checked header, a msgpack body, and raw aligned buffers. Nothing is pickled.

::

    0   magic, version, flags, bytes of name and body, buffers, bytes in all, generation, bytes of name, checksum
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
import struct
import sys
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vllm_omni_sched.connectors.base import Edge, name_of
from vllm_omni_sched.errors import CorruptMessageError, PayloadError

if TYPE_CHECKING:
    import torch

MAGIC, VERSION = 0x31534F56, 1  # "VOS1"
ALIGNMENT = 64
_HEAD = struct.Struct("<IHHIIQQII")
_PLACE = struct.Struct("<QQ")
REVIVE = 1
"""Flag: the receiver makes objects of some dicts again, with the hook that it is given."""

_TENSOR, _NDARRAY, _IMAGE, _BYTES = 1, 2, 3, 4
_packed = msgspec.msgpack.Encoder().encode
_unpacked = msgspec.msgpack.Decoder().decode

Hook = Callable[[Any], Any]
Buffer = bytearray | memoryview
"""Memory that can be written to, in single bytes."""


class Message:
    """A payload on its way from stage to stage, not yet written anywhere.

    Attributes:
        nbytes: of the message when written.
        payload_bytes: of its buffers alone.
        longest: dtype and number of dimensions of its longest buffer; None without one.
    """

    def __init__(self, edge: Edge, key: str, body: bytes, buffers: list[Any], flags: int = 0) -> None:
        self.edge, self.key, self.name = edge, key, name_of(edge, key)
        self._body, self._buffers, self._flags = body, buffers, flags
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
                longest, self.longest = nbytes, (str(buffer.dtype).removeprefix("torch."), buffer.ndim)
        self.nbytes = at

    def write_to(self, target: memoryview, address: int, generation: int = 0) -> None:
        """Write it; each buffer is copied once.

        Args:
            target: memory of at least `nbytes` bytes, format "B".
            address: of the first byte of ``target``.
            generation: what `open_message` may ask for.
        """
        table = b"".join([_PLACE.pack(*place) for place in self._places])
        body = self.name + self._body
        fields = (MAGIC, VERSION, self._flags, len(body), len(table) // 16, self.nbytes, generation, len(self.name))
        checksum = zlib.crc32(body, zlib.crc32(table, zlib.crc32(_HEAD.pack(*fields, 0))))
        front = b"".join((_HEAD.pack(*fields, checksum), table, body))
        target[: len(front)] = front
        for (at, nbytes), buffer in zip(self._places, self._buffers, strict=True):
            if nbytes:
                _copy(buffer, target, at, address + at)

    def to_buffer(self) -> bytearray:
        """The message in memory of its own."""
        written = bytearray(self.nbytes)
        self.write_to(memoryview(written), ctypes.addressof(ctypes.c_char.from_buffer(written)))
        return written


def make_message(edge: Edge, key: str, payload: Any, fallback: Hook | None = None, revives: bool = False) -> Message:
    """Take a payload apart.

    Args:
        fallback: makes plain data of objects that msgspec does not know.
        revives: whether the receiver has to make such objects again (see `REVIVE`).

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
        buffers.append(np.frombuffer(payload, np.uint8))
        payload = msgspec.msgpack.Ext(_BYTES, _packed(0))
    try:
        body = msgspec.msgpack.Encoder(enc_hook=hook).encode(payload)
    except PayloadError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PayloadError(f"the payload cannot be sent: {error}") from error
    return Message(edge, key, body, buffers, REVIVE if revives else 0)


class Arrival:
    """A message that has arrived, and whose front is proved to be whole.

    Args:
        data: the message, or more; its tensors and arrays will be views of it.
        name, generation: what the message must say of itself; None: anything.

    Raises:
        CorruptMessageError: it is cut off, damaged, or another message than the one asked for.
    """

    def __init__(self, data: Any, name: bytes | None = None, generation: int | None = None) -> None:
        self._data = data
        view = memoryview(data)
        if len(view) < _HEAD.size:
            raise CorruptMessageError(f"a message of {len(view)} bytes is shorter than its header")
        magic, version, flags, in_body, count, total, made, named, checksum = _HEAD.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise CorruptMessageError(f"not a message of version {VERSION} (magic {magic:#x}, version {version})")
        end = _HEAD.size + _PLACE.size * count + in_body
        if not end <= total <= len(view) or named > in_body:
            raise CorruptMessageError(f"a message says it has {total} bytes, {end} in front; here are {len(view)}")
        fields = (magic, version, flags, in_body, count, total, made, named)
        if zlib.crc32(view[_HEAD.size : end], zlib.crc32(_HEAD.pack(*fields, 0))) != checksum:
            raise CorruptMessageError("the checksum of a message does not fit its front")
        if generation is not None and made != generation:
            raise CorruptMessageError(f"a message of generation {made} lies where generation {generation} should be")
        start = end - in_body
        if name is not None and view[start : start + named] != name:
            raise CorruptMessageError("a message with another key lies where this one should be")
        self._places = list(_PLACE.iter_unpack(view[_HEAD.size : start]))
        for at, nbytes in self._places:
            if at + nbytes > total or at < end:
                raise CorruptMessageError("a buffer lies outside its message")
        self._body = view[start + named : end]
        self._flags = flags
        self.nbytes: int = total
        self.generation: int = made

    def open(self, revive: Hook | None = None) -> Any:
        """The payload.

        Args:
            revive: applied to payloads whose sender asked for it.

        Raises:
            CorruptMessageError: the body is damaged.
        """
        try:
            payload = msgspec.msgpack.Decoder(ext_hook=self._from_extension).decode(self._body)
        except (msgspec.DecodeError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            raise CorruptMessageError(f"the body of a message cannot be read: {error}") from error
        return revive(payload) if revive is not None and self._flags & REVIVE else payload

    def _from_extension(self, code: int, packed: memoryview) -> Any:
        described = _unpacked(packed)
        if code == _BYTES:
            at, nbytes = self._places[described]
            return bytes(memoryview(self._data)[at : at + nbytes])
        which, kind, shape = described
        at, nbytes = self._places[which]
        if code == _TENSOR:
            return _tensor(self._data, at, nbytes, kind, shape)
        if code == _NDARRAY:
            dtype = np.dtype(kind)
            return np.frombuffer(self._data, dtype, nbytes // (dtype.itemsize or 1), at).reshape(shape)
        if code == _IMAGE:
            from PIL import Image

            return Image.frombuffer(
                kind, tuple(shape), bytes(memoryview(self._data)[at : at + nbytes]), "raw", kind, 0, 1
            )
        raise CorruptMessageError(f"a message holds an extension of unknown kind {code}")


def _as_extension(value: Any, buffers: list[Any]) -> msgspec.msgpack.Ext | None:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach()
        if value.layout is not torch.strided or value.is_quantized:
            raise PayloadError(f"a tensor of layout {value.layout} cannot be sent; make it dense first")
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        code, dtype, shape = _TENSOR, str(value.dtype).removeprefix("torch."), list(value.shape)
        described: list[Any] = [len(buffers), dtype, shape]
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.kind == "V":
            raise PayloadError(f"an array of dtype {value.dtype} cannot be sent")
        code, described = _NDARRAY, [len(buffers), value.dtype.str, list(value.shape)]
    elif isinstance(value, np.generic):
        return _as_extension(np.asarray(value), buffers)
    elif type(value).__module__.startswith("PIL."):
        if value.mode in ("1", "P"):  # bits, and indices into a palette, are not rows of bytes
            value = value.convert("L" if value.mode == "1" else "RGBA")
        described = [len(buffers), value.mode, list(value.size)]
        code, value = _IMAGE, np.ascontiguousarray(value)
    else:
        return None
    buffers.append(value)
    return msgspec.msgpack.Ext(code, _packed(described))


def _tensor(data: Any, at: int, nbytes: int, kind: str, shape: list[int]) -> torch.Tensor:
    import torch

    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptMessageError(f"a message holds a tensor of unknown dtype {kind!r}")
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=nbytes // dtype.itemsize, offset=at)
    return flat if len(shape) == 1 else flat.view(shape)


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
    flat.view(source.shape).copy_(source)
