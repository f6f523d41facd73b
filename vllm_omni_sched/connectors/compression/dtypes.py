"""Data types by torch's names, and lookup by tables; numpy has no bfloat16, so its bits are handled as uint16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

    ``roundoff``: largest relative error of rounding a normal number to it; ``tiny``: largest absolute error of rounding
    a subnormal one, or 2^-126 for computations in float32; ``infinity``: bits of +inf; ``max``: the largest number.
    """

    bits: npt.DTypeLike
    magnitude: int
    infinity: int
    roundoff: float
    tiny: float
    max: float


FLOATS = {
    "float32": FloatFormat(np.uint32, 0x7FFFFFFF, 0x7F800000, 2.0**-24, 2.0**-126, float(np.finfo(np.float32).max)),
    "bfloat16": FloatFormat(np.uint16, 0x7FFF, 0x7F80, 2.0**-8, 2.0**-126, 255 / 128 * 2.0**127),
    "float16": FloatFormat(np.uint16, 0x7FFF, 0x7C00, 2.0**-11, 2.0**-25, 65504.0),
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
