"""Lossy codecs to 8 bits for each value: float features as int8 with a scale per channel, and PCM by the µ-law."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.connectors.compression.codec import (
    FLOATS,
    PIECE,
    Bytes,
    Codec,
    Floats,
    from_float32,
    lookup,
    num_elements,
    pieces,
    to_float32,
)

LEVELS = 127
MIN_ROWS = 8  # with fewer rows, the scales take too large a share of the result
MIN_CHANNELS = 16  # fewer are no features: hidden states, embeddings, latents
MIN_SCALE = 2.0**-126


class Int8Codec(Codec):
    """Codec to symmetric int8 per channel; a channel is an index of the last dimension.

    Features have channels of widely different size, and a scale per token would drown the small ones (Dettmers et al.,
    "LLM.int8()", NeurIPS 2022). Error: 1/254 of the largest magnitude of the channel, and what rounding to the data
    type adds: 1/256 of it for bfloat16, 1/2048 for float16. NaN and infinity are declined.
    """

    name: ClassVar[str] = "int8"
    lossy: ClassVar[bool] = True
    seconds_per_byte = 1e-9

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return (
            dtype in FLOATS and len(shape) >= 2 and shape[-1] >= MIN_CHANNELS and num_elements(shape[:-1]) >= MIN_ROWS
        )

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


MU = 255.0


class MuLawCodec(Codec):
    """Codec of PCM in int16 by the continuous µ-law of ITU-T G.711, µ = 255, in 255 levels.

    Error: up to 2.21% of the value and 1.2e-4 of full scale.
    """

    name: ClassVar[str] = "mulaw"
    lossy: ClassVar[bool] = True
    seconds_per_byte = 1e-9

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return dtype == "int16"

    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes:
        codes = np.empty(raw.size // 2, np.uint8)
        lookup(_codes(), raw.view(np.uint16), codes)
        return codes

    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        values = out.view(np.int16)
        if data.size != values.size:
            raise self._corrupt(f"{data.size} bytes for {values.size} samples")
        lookup(_samples(), data, values)


@cache
def _codes() -> npt.NDArray[np.uint8]:
    """Return the code of each int16, by its bits."""
    x = np.arange(1 << 16).astype(np.uint16).view(np.int16) / 32768.0
    level = np.rint(np.sign(x) * np.log1p(MU * np.abs(x)) / np.log1p(MU) * LEVELS)
    codes: npt.NDArray[np.uint8] = (level + 128).astype(np.uint8)
    return codes


@cache
def _samples() -> npt.NDArray[np.int16]:
    """Return the value of each code."""
    level = np.clip(np.arange(256) - 128.0, -LEVELS, LEVELS) / LEVELS
    x = np.sign(level) * np.expm1(np.abs(level) * np.log1p(MU)) / MU
    values: npt.NDArray[np.int16] = np.clip(np.rint(x * 32768), -32768, 32767).astype(np.int16)
    return values
