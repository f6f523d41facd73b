"""A payload taken apart, to be written where it goes."""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.connectors.base import Edge, name_of
from vllm_omni_sched.connectors.framing.layout import (
    ALIGNMENT,
    BYTES,
    CHECKSUM,
    HEAD,
    IMAGE,
    LARGE,
    MAGIC,
    NDARRAY,
    PAGE,
    PLACE,
    TENSOR,
    VERSION,
    Hook,
    packed,
)
from vllm_omni_sched.errors import PayloadError


class Message:
    """A payload on its way from stage to stage, not yet written anywhere.

    Attributes:
        body: msgpack of all but the buffers.
        buffers: arrays and tensors.
        flags: `REVIVE`, `PACKED`, `ON_DEVICE`.
        done: called by a path of this host, once, when nobody has the message and nobody will get it any more.
        nbytes: of the message when written.
        payload_bytes: of its buffers alone.
        longest: dtype and number of dimensions of its longest buffer; None without one.
    """

    def __init__(self, edge: Edge, key: str, body: bytes, buffers: list[Any]) -> None:
        self.edge, self.key, self.name = edge, key, name_of(edge, key)
        self.body, self.buffers = body, buffers
        self.flags = 0
        self.done: Callable[[], None] | None = None
        self._places: list[tuple[int, int]] = []
        self.payload_bytes = longest = 0
        self.longest: tuple[str, int] | None = None
        at = HEAD.size + PLACE.size * len(buffers) + len(self.name) + len(body)
        for buffer in buffers:
            nbytes = int(buffer.nbytes)
            alignment = PAGE if nbytes >= LARGE else ALIGNMENT
            at = -(-at // alignment) * alignment
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
        head = HEAD.pack(0, MAGIC, VERSION, self.flags, len(name), len(body), len(places), generation, self.nbytes)
        front = b"".join((head[CHECKSUM.size :], *[PLACE.pack(*place) for place in places], name, body))
        target[: CHECKSUM.size] = CHECKSUM.pack(zlib.crc32(front))
        target[CHECKSUM.size : CHECKSUM.size + len(front)] = front
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
        payload = msgspec.msgpack.Ext(BYTES, packed(0))
    try:
        body = msgspec.msgpack.Encoder(enc_hook=hook).encode(payload)
    except PayloadError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
        raise PayloadError(f"the payload cannot be sent: {error}") from error
    return Message(edge, key, body, buffers)


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
        code = TENSOR
        described: list[Any] = [len(buffers), _dtype_name(value.dtype), tuple(value.shape)]
    elif isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise PayloadError("a masked array cannot be sent; fill it, or send data and mask")
        if value.dtype.hasobject or value.dtype.kind == "V":
            raise PayloadError(f"an array of dtype {value.dtype} cannot be sent")
        code, described = NDARRAY, [len(buffers), value.dtype.str, list(value.shape)]
    elif isinstance(value, np.generic):
        return _as_extension(np.asarray(value), buffers)
    elif (pil := sys.modules.get("PIL.Image")) is not None and isinstance(value, pil.Image):
        if value.mode in ("1", "P"):  # bits, and indices into a palette, are not rows of bytes
            value = value.convert("L" if value.mode == "1" else "RGBA")
        described = [len(buffers), value.mode, list(value.size)]
        code, value = IMAGE, np.ascontiguousarray(value)
    else:
        return None
    buffers.append(value)
    return msgspec.msgpack.Ext(code, packed(described))


@lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


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
