"""Lossy compression of float features to 8 bits per value with a scale per channel."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.connectors.compression.codec import Codec, ErrorBound, Kind
from vllm_omni_sched.connectors.compression.dtypes import (
    FLOATS,
    PIECE,
    Bytes,
    Floats,
    from_float32,
    num_elements,
    pieces,
    to_float32,
)

LEVELS = 127
MIN_ROWS = 8  # with fewer rows, the scales take too large a share of the result
MIN_SCALE = 2.0**-126


class Int8Codec(Codec):
    """Codec to symmetric int8 per channel; a channel is an index of the last dimension.

    Features have channels of very different size, and a scale per token would drown the small ones (Dettmers et al.,
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
