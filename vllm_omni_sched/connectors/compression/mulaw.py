"""Lossy compression of PCM audio to 8 bits per sample."""

from functools import cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.connectors.compression.codec import Codec, ErrorBound, Kind
from vllm_omni_sched.connectors.compression.dtypes import Bytes, lookup, pieces

MU = 255.0
LEVELS = 127  # each side of 0
STEP = (1 + MU) ** (0.5 / LEVELS) - 1  # half a level, of 1/MU + |x|
FULL_SCALE = {"int16": 32768.0, "float32": 1.0}


class MuLawCodec(Codec):
    """Codec by the continuous µ-law of ITU-T G.711, µ = 255, in 255 levels; int16, and float32 within [-1, 1].

    Error: up to 2.21% of the value and 1.2e-4 of full scale (1.0, or 32768 in int16). float32 that is not finite, or
    beyond full scale, is declined.
    """

    name: ClassVar[str] = "mulaw"
    lossy: ClassVar[bool] = True
    kinds: ClassVar[frozenset[Kind]] = frozenset({Kind.AUDIO})

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return dtype in FULL_SCALE

    def error_bound(self, dtype: str) -> ErrorBound:
        # half a level; float32 is cut to 16 bits first, and int16 rounded last: together a step of those
        return ErrorBound(of_value=STEP, absolute=(STEP / MU + 1.03 / 32768) * FULL_SCALE[dtype])

    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes | None:
        codes = np.empty(raw.size // (2 if dtype == "int16" else 4), np.uint8)
        if dtype == "int16":
            lookup(_encoder(), raw.view(np.uint16), codes)
            return codes
        values = raw.view(np.float32)
        for piece in pieces(values.size):
            part = values[piece]
            if not np.abs(part).max() <= 1.0:  # NaN is not
                return None
            pcm = np.minimum(np.rint(part * np.float32(32768)), np.float32(32767)).astype(np.int16)
            lookup(_encoder(), pcm.view(np.uint16), codes[piece])
        return codes

    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        values = out.view(dtype)
        if data.size != values.size:
            raise self._corrupt(f"{data.size} bytes for {values.size} samples")
        lookup(_decoder(dtype), data, values)


@cache
def _encoder() -> npt.NDArray[np.uint8]:
    """Return the code of each int16, by its bits."""
    x = np.arange(1 << 16).astype(np.uint16).view(np.int16) / 32768.0
    level = np.rint(np.sign(x) * np.log1p(MU * np.abs(x)) / np.log1p(MU) * LEVELS)
    codes: npt.NDArray[np.uint8] = (level + 128).astype(np.uint8)
    return codes


@cache
def _decoder(dtype: str) -> npt.NDArray[np.generic]:
    """Return the value of each code."""
    level = np.clip(np.arange(256) - 128.0, -LEVELS, LEVELS) / LEVELS
    x = np.sign(level) * np.expm1(np.abs(level) * np.log1p(MU)) / MU
    values: npt.NDArray[np.generic] = x.astype(np.float32)
    if dtype == "int16":
        values = np.clip(np.rint(x * 32768), -32768, 32767).astype(np.int16)
    return values
