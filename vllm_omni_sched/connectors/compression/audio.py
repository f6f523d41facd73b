"""Compression of PCM audio: lossless by FLAC, with the soundfile library, or to 8 bits per sample by the µ-law."""

import io
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.connectors.compression.codec import Codec, ErrorBound, Kind
from vllm_omni_sched.connectors.compression.dtypes import Bytes, lookup, num_elements, pieces

MAX_CHANNELS = 8
SAMPLE_RATE = 16_000  # FLAC wants one, and nothing here reads it


@cache
def soundfile() -> ModuleType:
    """Return the binding of libsndfile.

    Raises:
        ImportError: soundfile is not installed.
        OSError: libsndfile is not found.
    """
    import soundfile as module

    loaded: ModuleType = module
    return loaded


class FlacCodec(Codec):
    """Codec by FLAC (RFC 9639) for int16, and for float32 converted from int16.

    1. float32 is taken if each value is, bit for bit, an int16 / 32768, which is how audio files are read; it is
       declined at the first that is not (-0.0 too).
    2. A last dimension of 2 to 8 is channels; anything else goes as one channel.
    """

    name: ClassVar[str] = "flac"
    kinds: ClassVar[frozenset[Kind]] = frozenset({Kind.AUDIO, Kind.OTHER})
    max_bytes: ClassVar[int] = 1 << 32

    def __init__(self) -> None:
        soundfile()

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return dtype in ("int16", "float32")

    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes | None:
        pcm = raw.view(np.int16) if dtype == "int16" else _as_int16(raw.view(np.float32))
        if pcm is None:
            return None
        file, channels = io.BytesIO(), _channels(shape)
        with self._open(file, mode="w", samplerate=SAMPLE_RATE, channels=channels, format="FLAC") as sound:
            sound.write(pcm.reshape(-1, channels))
        return np.frombuffer(file.getbuffer(), np.uint8)

    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        if data[:4].tobytes() != b"fLaC":
            raise self._corrupt("it does not begin with fLaC")
        channels = _channels(shape)
        frames = num_elements(shape) // channels
        pcm = out.view(np.int16) if dtype == "int16" else np.empty(frames * channels, np.int16)
        try:
            with self._open(io.BytesIO(data.tobytes()), mode="r") as sound:
                stated = (sound.format, sound.channels, sound.frames, sound.subtype)
                if stated != ("FLAC", channels, frames, "PCM_16"):
                    raise self._corrupt(f"{stated} for {frames} frames of {channels} channels")
                read = sound.read(frames, out=pcm.reshape(-1, channels), dtype="int16")
        except RuntimeError as error:  # libsndfile's
            if isinstance(error, soundfile().SoundFileError):
                raise self._corrupt(str(error)) from None
            raise
        if len(read) != frames:
            raise self._corrupt(f"it ends after {len(read)} of {frames} frames")
        if dtype == "float32":
            np.multiply(pcm, np.float32(1 / 32768), out=out.view(np.float32), dtype=np.float32)

    def _open(self, file: io.BytesIO, **how: Any) -> Any:
        return soundfile().SoundFile(file, **how)


def _channels(shape: tuple[int, ...]) -> int:
    return shape[-1] if len(shape) >= 2 and 2 <= shape[-1] <= MAX_CHANNELS else 1


def _as_int16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int16] | None:
    """Return the int16 values that these floats represent exactly, or None."""
    pcm = np.empty(values.size, np.int16)
    for piece in pieces(values.size):
        with np.errstate(invalid="ignore", over="ignore"):
            pcm[piece] = values[piece] * np.float32(32768)
        again = pcm[piece] * np.float32(1 / 32768)
        if not np.array_equal(again.view(np.uint32), values[piece].view(np.uint32)):
            return None
    return pcm


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
