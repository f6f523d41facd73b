"""Messages that are not written yet: a msgpack body of the payload, and the arrays that are not in the body."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.config.errors import PayloadError
from vllm_omni_sched.connectors.edge import Edge, name_of

MAGIC, VERSION = 0x31534F56, 4  # "VOS1"
ALIGNMENT = 64
LARGE, PAGE = 256 << 10, 4096
"""Size in bytes from which buffers start at a page: copies between other addresses take up to three times as long."""
HEAD = struct.Struct("<IIHHIIIQQI")
CHECKSUM = struct.Struct("<I")
PLACE = struct.Struct("<QQ")
REVIVE, PACKED, ON_DEVICE, CHECKED = 1, 2, 4, 8
"""Flags: the receiver makes objects of some dicts again, with a hook that it is given; some buffers are compressed;
some lie on a device, as long as the receiver has the message; the header has a checksum of the buffers, too."""

TENSOR, NDARRAY, IMAGE, BYTES = 1, 2, 3, 4
"""Kinds of msgpack extensions."""
VALUE = struct.Struct("<IH")
"""Head of an extension: the number of the buffer, and the length of the description (msgpack of dtype and shape)."""
HERE = 0xFFFFFFFF
"""Value instead of a buffer's number: the bytes follow the description."""
EMBEDDED = 4096
"""Size in bytes up to which a value is in the body, which always has a checksum: in shared memory, copying it once more
and checking it costs no more than a separate buffer without a checksum. For twice the size it does."""
packed = msgspec.msgpack.Encoder().encode
unpacked = msgspec.msgpack.Decoder().decode

Hook = Callable[[Any], Any]
Ext = msgspec.msgpack.Ext


class Packer:
    """Reusable msgpack encoder that collects the arrays of a payload, for one thread at a time.

    Attributes:
        buffers: arrays of the last payload that are not in the body.
        longest: dtype and number of dimensions of its longest array; None without one.
    """

    __slots__ = ("_encode", "_fallback", "_longest_bytes", "buffers", "longest")

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._hook).encode
        self.buffers: list[Any] = []
        self.longest: tuple[str, int] | None = None
        self._reset(None)

    def pack(self, payload: Any, fallback: Hook | None) -> tuple[bytes, list[Any], tuple[str, int] | None]:
        """Return the body of a payload, its buffers, and dtype and number of dimensions of its longest array.

        Args:
            fallback: makes plain data of objects that msgspec does not know.

        Raises:
            PayloadError: a part of the payload cannot be sent.
        """
        self._fallback = fallback
        try:
            if isinstance(payload, (bytes, bytearray, memoryview)):  # msgpack would copy these into the body
                if isinstance(payload, memoryview) and not payload.c_contiguous:
                    payload = payload.tobytes()
                self.buffers.append(np.frombuffer(payload, np.uint8))
                self.longest = "uint8", 1
                payload = Ext(BYTES, packed(0))
            return self._encode(payload), self.buffers, self.longest
        except PayloadError:
            raise
        except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
            raise PayloadError(f"the payload cannot be sent: {error}") from error
        finally:
            self._reset(None)  # holds nothing of the payload

    def _reset(self, fallback: Hook | None) -> None:
        self._fallback, self.buffers, self.longest, self._longest_bytes = fallback, [], None, 0

    def _hook(self, value: Any) -> Any:
        """Return what msgpack writes for ``value``.

        Raises:
            PayloadError: it cannot be sent.
        """
        torch = sys.modules.get("torch")  # a payload can have tensors or images only if their modules are imported
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(value, torch)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(_checked(np.asanyarray(value)))
        if (pil := sys.modules.get("PIL.Image")) is not None and isinstance(value, pil.Image):
            if value.mode in ("1", "P"):  # bits, and indices into a palette, are not rows of bytes
                value = value.convert("L" if value.mode == "1" else "RGBA")
            return self._extension(IMAGE, np.ascontiguousarray(value), packed((value.mode, value.size)))
        if self._fallback is None:
            raise PayloadError(
                f"a {type(value).__name__} cannot be sent: tensors, arrays, images and plain data (dict, list, str, "
                "int, float, bool, None, bytes, dataclasses, msgspec structs) can"
            )
        return self._fallback(value)

    def _tensor(self, tensor: Any, torch: Any) -> msgspec.msgpack.Ext:
        described = b""
        try:
            if tensor.layout is torch.strided:
                nbytes, name, front, described = _of_tensor(tensor.dtype, tensor.shape)
        except RuntimeError:  # of nested tensors, which have no shape
            pass
        if not described:
            raise PayloadError(f"a tensor that is {_oddity(tensor)} cannot be sent; make it dense first")
        if nbytes > self._longest_bytes:
            self._longest_bytes, self.longest = nbytes, (name, tensor.ndim)
        if tensor.is_neg() or tensor.is_conj():
            tensor = tensor.resolve_conj().resolve_neg()
        if nbytes > EMBEDDED or not tensor.is_cpu:
            if tensor.is_meta:
                raise PayloadError("a tensor on the meta device cannot be sent: it has no data")
            return self._in_buffer(TENSOR, tensor, described)
        if not tensor.is_contiguous():
            tensor = tensor.detach().contiguous()
        return Ext(TENSOR, front + ctypes.string_at(tensor.data_ptr(), nbytes) if nbytes else front)

    def _array(self, array: Any) -> msgspec.msgpack.Ext:
        return self._extension(NDARRAY, array, packed((array.dtype.str, array.shape)))

    def _extension(self, code: int, array: Any, described: bytes) -> msgspec.msgpack.Ext:
        if array.nbytes > self._longest_bytes:
            self._longest_bytes, self.longest = array.nbytes, (str(array.dtype), array.ndim)
        if array.nbytes > EMBEDDED:
            return self._in_buffer(code, array, described)
        return Ext(code, VALUE.pack(HERE, len(described)) + described + array.tobytes())

    def _in_buffer(self, code: int, value: Any, described: bytes) -> msgspec.msgpack.Ext:
        self.buffers.append(value)
        return Ext(code, VALUE.pack(len(self.buffers) - 1, len(described)) + described)


def _oddity(tensor: Any) -> str:
    return "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)


def _checked(array: Any) -> Any:
    if isinstance(array, np.ma.MaskedArray):
        raise PayloadError("a masked array cannot be sent; fill it, or send data and mask")
    if array.dtype.hasobject or array.dtype.kind == "V":
        raise PayloadError(f"an array of dtype {array.dtype} cannot be sent")
    return array


@lru_cache(maxsize=4096)
def _of_tensor(dtype: Any, shape: Any) -> tuple[int, str, bytes, bytes]:
    """Return, for all such tensors: bytes, dtype, what precedes them in the body, and description (none if
    quantized).
    """
    name = str(dtype).removeprefix("torch.")
    if name.startswith("q"):
        return 0, name, b"", b""
    described = packed((name, tuple(shape)))
    return math.prod(shape) * dtype.itemsize, name, VALUE.pack(HERE, len(described)) + described, described


_packers: list[Packer] = []  # that no thread uses now: making an encoder takes longer than encoding most payloads
_memmove = ctypes.PyDLL(None).memmove  # keeps the interpreter lock: a busy thread that gets it may keep it for 5 ms
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
BRIEF = 1 << 20
"""Size in bytes up to which data is copied without releasing the interpreter lock, in a tenth of a millisecond."""


class Message:
    """A payload on its way from stage to stage, not yet written anywhere.

    Attributes:
        body: msgpack of all but the buffers.
        buffers: arrays and tensors that are not in the body.
        flags: `REVIVE`, `PACKED`, `ON_DEVICE`.
        done: called once by a transport within this host, when no process has the message or can still receive it.
        nbytes: size of the message when written.
        payload_bytes: size of its buffers alone.
        longest: dtype and number of dimensions of its longest array; None without one.
    """

    def __init__(
        self, edge: Edge, key: str, body: bytes, buffers: list[Any], longest: tuple[str, int] | None = None
    ) -> None:
        self.edge, self.key, self.name = edge, key, name_of(edge, key)
        self.body, self.buffers, self.longest = body, buffers, longest
        self.flags = self.payload_bytes = 0
        self.done: Callable[[], None] | None = None
        self._places: list[tuple[int, int]] = []
        at = HEAD.size + PLACE.size * len(buffers) + len(self.name) + len(body)
        for buffer in buffers:
            nbytes = int(buffer.nbytes)
            alignment = PAGE if nbytes >= LARGE else ALIGNMENT
            at = -(-at // alignment) * alignment
            self._places.append((at, nbytes))
            at += nbytes
            self.payload_bytes += nbytes
        self.nbytes = at

    def write_to(self, target: memoryview, address: int, generation: int = 0, checked: bool = False) -> None:
        """Write the message to memory; each buffer is copied once.

        Args:
            target: memory of at least `nbytes` bytes, format "B".
            address: of the first byte of ``target``.
            generation: number that the receiver may require.
            checked: whether to add a checksum of the buffers, which the receiver verifies.

        Raises:
            ValueError: ``target`` is too short.
        """
        if len(target) < self.nbytes:
            raise ValueError(f"a message of {self.nbytes} bytes does not fit into {len(target)}")
        checksum = 0
        for (at, nbytes), buffer in zip(self._places, self.buffers, strict=True):
            if nbytes:
                _copy(buffer, target, at, address + at)
                if checked:
                    checksum = zlib.crc32(target[at : at + nbytes], checksum)
        front = self._front(generation, checksum if checked else None)
        target[: len(front)] = front

    def pieces(self, checked: bool = False) -> Iterator[Any]:
        """Yield the message as bytes and arrays of bytes, for files; contiguous buffers are not copied. See
        `write_to`.
        """
        flat = [_flat(buffer) if buffer.nbytes else b"" for buffer in self.buffers]
        checksum = 0
        for buffer in flat if checked else ():
            checksum = zlib.crc32(buffer, checksum)
        yield (front := self._front(0, checksum if checked else None))
        at = len(front)
        for (start, nbytes), buffer in zip(self._places, flat, strict=True):
            yield bytes(start - at)
            at = start + nbytes
            if nbytes:
                yield buffer
        yield bytes(self.nbytes - at)

    def _front(self, generation: int, of_buffers: int | None) -> bytes:
        name, body, places = self.name, self.body, self._places
        counts = (len(name), len(body), len(places))
        flags = self.flags if of_buffers is None else self.flags | CHECKED
        head = HEAD.pack(0, MAGIC, VERSION, flags, *counts, generation, self.nbytes, of_buffers or 0)
        table = b"".join([PLACE.pack(*place) for place in places]) if places else b""
        front = head[CHECKSUM.size :] + table + name + body
        return CHECKSUM.pack(zlib.crc32(front)) + front

    def to_buffer(self, checked: bool = False) -> bytearray:
        """Return the message written to new memory. See `write_to`."""
        written = bytearray(self.nbytes)
        self.write_to(memoryview(written), ctypes.addressof(ctypes.c_char.from_buffer(written)), checked=checked)
        return written


def make_message(edge: Edge, key: str, payload: Any, fallback: Hook | None = None) -> Message:
    """Return a payload as a message: encode its body and collect its arrays.

    Args:
        fallback: makes plain data of objects that msgspec does not know.

    Raises:
        PayloadError: a part of the payload cannot be sent.
    """
    try:
        packer = _packers.pop()
    except IndexError:
        packer = Packer()
    body, buffers, longest = packer.pack(payload, fallback)
    _packers.append(packer)
    return Message(edge, key, body, buffers, longest)


def _flat(source: Any) -> Any:
    """Return an array or tensor as bytes on the host; shape (nbytes,), uint8."""
    if isinstance(source, np.ndarray):
        return np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    import torch

    return source.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _copy(source: Any, target: memoryview, at: int, address: int) -> None:
    """Copy an array or tensor to byte ``at`` of ``target``, which is at ``address``."""
    if isinstance(source, np.ndarray):
        if source.flags.c_contiguous:
            _move(address, source.ctypes.data, source.nbytes)
        else:
            np.frombuffer(target, source.dtype, source.size, at).reshape(source.shape)[...] = source
        return
    if source.is_cpu and source.is_contiguous():
        _move(address, source.data_ptr(), source.nbytes)
        return
    import torch

    flat = torch.frombuffer(target, dtype=source.dtype, count=source.numel(), offset=at)
    flat.view(source.shape).copy_(source.detach())


def _move(target: int, source: int, nbytes: int) -> None:
    (_memmove if nbytes <= BRIEF else ctypes.memmove)(target, source, nbytes)
