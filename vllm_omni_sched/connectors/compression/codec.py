"""Interface of all codecs, and data types by torch's names; numpy has no bfloat16, so its bits are uint16 here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.config.errors import CorruptDataError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}


def num_elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of this shape; 1 for a scalar's ``()``."""
    return math.prod(shape)


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a contiguous tensor in bytes.

    Raises:
        ValueError: the data type is unknown, or a dimension is negative.
    """
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {dtype!r}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape must have no negative dimension, got {shape}")
    return ITEM_BYTES[dtype] * num_elements(shape)


@dataclass(frozen=True)
class FloatFormat:
    """Describes a floating-point data type by its bits.

    ``infinity``: bits of +inf; ``max``: the largest number.
    """

    bits: npt.DTypeLike
    magnitude: int
    infinity: int
    max: float


FLOATS = {
    "float32": FloatFormat(np.uint32, 0x7FFFFFFF, 0x7F800000, float(np.finfo(np.float32).max)),
    "bfloat16": FloatFormat(np.uint16, 0x7FFF, 0x7F80, 255 / 128 * 2.0**127),
    "float16": FloatFormat(np.uint16, 0x7FFF, 0x7C00, 65504.0),
}
"""The data types of features."""


def to_float32(bits: npt.NDArray[np.unsignedinteger], dtype: str) -> Floats:
    """Convert numbers of one of `FLOATS` from their bits; exact."""
    if dtype == "bfloat16":
        wide = bits.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(np.float32)


def bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16, ties to even; for numbers, not NaN."""
    wide = values.view(np.uint32)
    rounded = wide >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += wide
    rounded >>= 16
    return rounded.astype(np.uint16)


def from_float32(values: Floats, dtype: str) -> npt.NDArray[np.unsignedinteger]:
    """Return the bits of the nearest number of one of `FLOATS`; for numbers, not NaN."""
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32)


PIECE = 1 << 15
"""Elements of a piece: with float32 temporaries, 128 KiB each."""


def pieces(total: int, step: int = PIECE) -> Iterator[slice]:
    """Yield slices that cover ``range(total)``."""
    for start in range(0, total, max(1, step)):
        yield slice(start, min(total, start + step))


def lookup(
    table: npt.NDArray[np.generic], indices: npt.NDArray[np.unsignedinteger], out: npt.NDArray[np.generic]
) -> None:
    """Set ``out[i] = table[indices[i]]`` for flat arrays; every index must be in the table.

    `numpy.take` copies indices of a small type to a large one: piecewise, that copy stays in the cache.
    """
    wide = np.empty(min(PIECE, indices.size), np.intp)
    for piece in pieces(indices.size):
        part = wide[: piece.stop - piece.start]
        part[:] = indices[piece]
        np.take(table, part, out=out[piece], mode="clip")


class Codec(ABC):
    """Codec that encodes buffers into fewer bytes, and decodes them.

    1. `decode` needs only the result of `encode`, data type and shape.
    2. A lossless codec restores the same bits. A lossy one keeps its bound for every value, or declines.
    3. `decode` raises on data that `encode` cannot have written, and writes only into ``out``. It does not detect
       changed bits in valid data: the transport is responsible for integrity.
    4. Codecs hold no state of a buffer, so that several threads may use one.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool] = False
    max_bytes: ClassVar[int] = 1 << 40
    seconds_per_byte: ClassVar[float]
    """Time to encode and decode, as measured on an EPYC core."""

    @abstractmethod
    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Return whether tensors of this type and shape can be encoded at all."""

    def suits(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Return the answer of `takes` for a known data type and a size within the limit."""
        return dtype in ITEM_BYTES and num_bytes(dtype, shape) <= self.max_bytes and self.takes(dtype, shape)

    def encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes | None:
        """Encode ``raw`` into a flat buffer, which may be larger; return None if its values do not suit this codec.

        Raises:
            ValueError: ``raw`` is not a flat contiguous array of the stated size, or `takes` is false.
        """
        check_buffer(raw, dtype, shape)
        if not self.suits(dtype, shape):
            raise ValueError(f"codec {self.name} does not take {dtype} of shape {shape}")
        return self._encode(raw, dtype, shape) if raw.size else np.empty(0, np.uint8)

    def decode(
        self, data: bytes | bytearray | memoryview | Bytes, dtype: str, shape: tuple[int, ...], out: Bytes
    ) -> None:
        """Decode ``data`` into ``out``, which is flat and of the size that type and shape give.

        Raises:
            CorruptDataError: ``data`` cannot be a result of `encode`; the content of ``out`` is undefined then.
            ValueError: ``out`` is not writeable, flat, contiguous and of the stated size.
        """
        check_buffer(out, dtype, shape)
        if not out.flags.writeable:
            raise ValueError("out must be writeable")
        flat = np.frombuffer(data, np.uint8)
        if not self.suits(dtype, shape):
            raise self._corrupt(f"it never holds {dtype} of shape {shape}")
        if out.size:
            self._decode(flat, dtype, shape, out)
        elif flat.size:
            raise self._corrupt(f"{flat.size} bytes for an empty tensor")

    def _corrupt(self, what: str) -> CorruptDataError:
        return CorruptDataError(f"not data of codec {self.name}: {what}")

    @abstractmethod
    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes | None:
        """Encode a buffer that is not empty."""

    @abstractmethod
    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        """Decode into a buffer that is not empty."""


def check_buffer(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> None:
    """Check that ``raw`` is a tensor of this type and shape as flat bytes.

    Raises:
        ValueError: it is not.
    """
    expected = num_bytes(dtype, shape)
    if raw.dtype != np.uint8 or raw.ndim != 1 or not raw.flags.c_contiguous:
        raise ValueError(f"a buffer must be a flat contiguous array of uint8, got {raw.ndim} dimensions of {raw.dtype}")
    if raw.size != expected:
        raise ValueError(f"{dtype} of shape {shape} is {expected} bytes, got {raw.size}")
