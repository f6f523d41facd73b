"""Tensors, arrays and images as msgpack extensions: described in the body, their bytes in buffers unless small."""

from __future__ import annotations

import ctypes
import math
import sys
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.connectors.framing.layout import BYTES, EMBEDDED, HERE, IMAGE, NDARRAY, TENSOR, VALUE, Hook, packed
from vllm_omni_sched.errors import PayloadError

Ext = msgspec.msgpack.Ext


class Packer:
    """A msgpack encoder that collects the arrays of payloads: one payload after the other, for one thread at a time.

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
            PayloadError: something in it cannot be sent.
        """
        self._reset(fallback)
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
        torch = sys.modules.get("torch")  # who has a tensor, or an image, has imported what makes them
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
        if tensor.is_neg() or tensor.is_conj():
            tensor = tensor.resolve_conj().resolve_neg()
        if nbytes > self._longest_bytes:
            self._longest_bytes, self.longest = nbytes, (name, tensor.ndim)
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
