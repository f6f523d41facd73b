"""Lossy compression of float features to 8 bits per value: int8 with a scale per channel, or fp8 with one scale."""

import math
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.connectors.compression.codec import Codec, ErrorBound, Kind
from vllm_omni_sched.connectors.compression.dtypes import (
    FLOATS,
    PIECE,
    Bytes,
    Floats,
    bfloat16_bits,
    from_float32,
    lookup,
    num_elements,
    pieces,
    to_float32,
)

LEVELS = 127
MIN_ROWS = 8  # with fewer rows, the scales take too large a share of the result
MIN_SCALE = 2.0**-126


class Int8Codec(Codec):
    """Codec to symmetric int8 per channel; a channel is an index of the last dimension.

    Features have channels of widely different size, and a scale per token would drown the small ones (Dettmers et al.,
    "LLM.int8()", NeurIPS 2022). Error: 1/254 of the largest magnitude of the channel, and what rounding to the data
    type adds: 1/256 of it for bfloat16, 1/2048 for float16. NaN and infinity are declined.
    """

    name: ClassVar[str] = "int8"
    lossy: ClassVar[bool] = True
    kinds: ClassVar[frozenset[Kind]] = frozenset({Kind.FEATURES})

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return dtype in FLOATS and len(shape) >= 2 and num_elements(shape[:-1]) >= MIN_ROWS

    def error_bound(self, dtype: str) -> ErrorBound:
        # 1e-5: the quotient and the product are rounded to float32
        return ErrorBound(of_peak=(0.5 + 1e-5) / LEVELS + FLOATS[dtype].roundoff, absolute=FLOATS[dtype].tiny)

    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes | None:
        rows = raw.view(FLOATS[dtype].bits).reshape(-1, shape[-1])
        peaks = _peaks(rows, dtype)
        if peaks is None:
            return None
        scales = _scales(peaks)
        data = np.empty(scales.nbytes + rows.size, np.uint8)
        data[: scales.nbytes] = scales.view(np.uint8)
        codes, inverse = data[scales.nbytes :].view(np.int8).reshape(rows.shape), 1 / scales
        for piece in pieces(len(rows), PIECE // shape[-1]):
            quotient = to_float32(rows[piece], dtype) * inverse
            np.rint(quotient, out=quotient)
            codes[piece] = quotient
        return data

    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        rows = out.view(FLOATS[dtype].bits).reshape(-1, shape[-1])
        scale_bytes = 4 * shape[-1]
        if data.size != scale_bytes + rows.size:
            raise self._corrupt(f"{data.size} bytes for {rows.size} values in {shape[-1]} channels")
        scales, codes = data[:scale_bytes].view(np.float32), data[scale_bytes:].view(np.int8).reshape(rows.shape)
        # 1.01: a peak that is the type's largest number, and float32's rounding
        if not (scales.min() >= MIN_SCALE and scales.max() <= FLOATS[dtype].max / LEVELS * 1.01):
            raise self._corrupt("a scale is out of range")
        with np.errstate(over="ignore"):  # -128, which no encoder writes
            for piece in pieces(len(rows), PIECE // shape[-1]):
                rows[piece] = from_float32(codes[piece] * scales, dtype)


def _peaks(rows: npt.NDArray[np.unsignedinteger], dtype: str) -> Floats | None:
    """Return the largest magnitude in each column; None for NaN or infinity. Magnitudes order as their bits do."""
    form = FLOATS[dtype]
    peaks = np.zeros(rows.shape[1], form.bits)
    for piece in pieces(len(rows), PIECE // rows.shape[1]):
        np.maximum(peaks, (rows[piece] & form.magnitude).max(axis=0), out=peaks)
    return None if int(peaks.max()) >= form.infinity else to_float32(peaks, dtype)


def _scales(peaks: Floats) -> Floats:
    """Return the value of one level; 127 levels never exceed the peak, so that no value decodes to infinity."""
    scales = np.maximum(peaks / np.float32(LEVELS), np.float32(MIN_SCALE))
    with np.errstate(over="ignore"):
        beyond = scales * np.float32(LEVELS) > np.maximum(peaks, np.float32(LEVELS * MIN_SCALE))
    return np.where(beyond, np.nextafter(scales, np.float32(0)), scales)


MAX_E4M3 = 448.0
NAN = 0x7F
MIN_EXPONENT, MAX_EXPONENT = -117, 120  # the smallest e4m3 times 2^-117 is 2^-126
CODES = np.arange(NAN)
NUMBERS = np.where(CODES < 8, CODES * 2.0**-9, (1 + CODES % 8 / 8) * np.exp2(CODES // 8 - 7.0))
"""Non-negative numbers of e4m3, by their codes."""


class Fp8Codec(Codec):
    """Codec to e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022), with one power of two as scale.

    One scale does for all channels: the format spans 18 binary orders of magnitude, 15 of them with all its digits.
    Error: 1/16 of the value (float32 goes by bfloat16: 0.07 of it), and 4.4e-6 of the largest magnitude in the buffer.
    Less exact than int8 where a channel's values are of one size, and better where they are not. NaN and infinity are
    declined.
    """

    name: ClassVar[str] = "fp8"
    lossy: ClassVar[bool] = True
    kinds: ClassVar[frozenset[Kind]] = frozenset({Kind.FEATURES})

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return dtype in FLOATS

    def error_bound(self, dtype: str) -> ErrorBound:
        by_bfloat16 = 2.0**-7 if dtype == "float32" else 0.0
        # half of the smallest step, 2^-10, times a scale of up to 2 * peak / 448
        return ErrorBound(2.0**-4 + by_bfloat16, 2.0**-9 / MAX_E4M3, FLOATS[dtype].tiny)

    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes | None:
        form = FLOATS[dtype]
        bits = raw.view(form.bits)
        peak = max(int((bits[piece] & form.magnitude).max()) for piece in pieces(bits.size))
        if peak >= form.infinity:
            return None
        exponent = _exponent(float(to_float32(np.array([peak], form.bits), dtype)[0]))
        data = np.empty(1 + bits.size, np.uint8)
        data[0], codes = exponent % 256, data[1:]
        if dtype != "float32":
            lookup(_encoder(dtype, exponent), bits, codes)
            return data
        table = _encoder("bfloat16", exponent)
        for piece in pieces(bits.size):
            lookup(table, bfloat16_bits(raw.view(np.float32)[piece]), codes[piece])
        return data

    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        bits = out.view(FLOATS[dtype].bits)
        if data.size != 1 + bits.size:
            raise self._corrupt(f"{data.size} bytes for {bits.size} values")
        exponent, codes = int(data[:1].view(np.int8)[0]), data[1:]
        if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
            raise self._corrupt(f"a scale of 2^{exponent}")
        if any(int((codes[piece] & NAN).max()) == NAN for piece in pieces(codes.size)):
            raise self._corrupt("NaN, which is never encoded")
        lookup(_decoder(dtype, exponent), codes, bits)


def _exponent(peak: float) -> int:
    """Return the exponent of the smallest power of two that scales ``peak`` to 448 or below."""
    mantissa, exponent = math.frexp(peak / MAX_E4M3)
    return max(MIN_EXPONENT, exponent - (mantissa == 0.5))


@lru_cache(maxsize=32)  # 64 KiB each
def _encoder(dtype: str, exponent: int) -> npt.NDArray[np.uint8]:
    """Return the code of each 16-bit float over ``2^exponent``, by its bits: the nearest number, ties to even."""
    magnitudes = to_float32(np.arange(1 << 15).astype(np.uint16), dtype)[: FLOATS[dtype].infinity]
    scaled = np.ldexp(magnitudes.astype(np.float64), -exponent)
    middles = (NUMBERS[:-1] + NUMBERS[1:]) / 2
    codes = np.searchsorted(middles, scaled)
    odd_tie = (codes % 2 == 1) & (scaled == np.append(middles, np.inf)[codes])
    # infinity: float32 above the largest bfloat16 becomes it
    half = np.full(1 << 15, NUMBERS.size - 1, np.uint8)
    half[: codes.size] = codes + odd_tie
    return np.concatenate([half, half | 0x80])


@lru_cache(maxsize=64)
def _decoder(dtype: str, exponent: int) -> npt.NDArray[np.unsignedinteger]:
    """Return the bits of the value of each code; none exceeds the type's largest number."""
    values: Floats = np.minimum(np.ldexp(NUMBERS, exponent), FLOATS[dtype].max).astype(np.float32)
    half = np.append(values, np.float32(0))  # NaN's place is never read
    return from_float32(np.concatenate([half, -half]), dtype)
