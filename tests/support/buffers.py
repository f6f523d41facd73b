"""Tensors as connectors hand them over: flat bytes with the name of a data type."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_omni_sched.connectors.compression.codec import FLOATS, Codec, bfloat16_bits, to_float32
from vllm_omni_sched.connectors.compression.compressor import Buffer

RNG = np.random.default_rng(5)


def flat(array: Any) -> np.ndarray:
    """Return the bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bfloat16(values: Any) -> np.ndarray:
    """Return the nearest bfloat16 values, as bits."""
    return bfloat16_bits(np.ascontiguousarray(values, np.float32))


def buffer(array: Any, dtype: str | None = None) -> Buffer:
    array = np.asarray(array)
    return Buffer(flat(array), dtype or str(array.dtype), array.shape)


def numbers(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values of a buffer as float64."""
    if dtype in FLOATS:
        return to_float32(raw.view(FLOATS[dtype].bits), dtype).astype(np.float64)
    return raw.view(dtype).astype(np.float64)


def hidden_states(rows: int = 64, channels: int = 48) -> np.ndarray:
    """Draw features with channels of widely different size, in float32."""
    return RNG.standard_normal((rows, channels), np.float32) * RNG.lognormal(0, 2, channels).astype(np.float32)


def tone(samples: int = 4096) -> np.ndarray:
    """Return a tone with noise, in int16."""
    return (9000 * np.sin(np.arange(samples) / 11) + RNG.normal(0, 50, samples)).astype(np.int16)


def samples() -> dict[str, Buffer]:
    """Return one buffer of each sort, by name."""
    states, pcm = hidden_states(), tone()
    ids = RNG.zipf(1.4, 3000) % 151_936
    return {
        "int64 ids": buffer(ids),
        "int32 ids": buffer(ids.reshape(30, 100).astype(np.int32)),
        "few ids": buffer(RNG.choice([-100, 7, 151_645, 1 << 40], 2000)),
        "one id": buffer(np.full(500, -1)),
        "bfloat16": buffer(bfloat16(states), "bfloat16"),
        "float16": buffer((states / 64).astype(np.float16)),
        "float32": buffer(states),
        "three dimensions": buffer(states.reshape(4, 16, 48)),
        "int16 PCM": buffer(pcm),
        "int16 stereo": buffer(pcm.reshape(-1, 2)),
        "float32 PCM": buffer((pcm / np.float32(32768)).astype(np.float32)),
        "picture": buffer((np.add.outer(np.arange(64), np.arange(96)) % 251).astype(np.uint8)),
        "mask": buffer(RNG.random(1000) < 0.1),
        "float64": buffer(np.linspace(0, 1, 300)),
    }


def large_samples() -> dict[str, Buffer]:
    """Buffers that codecs work on in several pieces, the last one shorter."""
    states, pcm = hidden_states(1500, 50), tone(70_001)
    return {
        "large bfloat16": buffer(bfloat16(states), "bfloat16"),
        "large float32": buffer(states),
        "large int16 PCM": buffer(pcm),
        "large float32 PCM": buffer((pcm / np.float32(32768)).astype(np.float32)),
        "large ids": buffer(np.arange(70_001) % 250 * 1000),
    }


ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
TINY = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-25}


def error_limit(codec: Codec, values: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return by how much each of these values may be off after a lossy codec, by what its docstring promises; flat."""
    if codec.name == "int8":  # half a level, and rounding to the data type
        peaks = np.abs(values.reshape(-1, shape[-1])).max(axis=0)
        limit = peaks * ((0.5 + 1e-5) / 127 + ROUNDOFF[dtype]) + TINY[dtype]
        return np.broadcast_to(limit, (values.size // shape[-1], shape[-1])).reshape(-1)
    step = 256 ** (0.5 / 127) - 1  # half a level of 1/255 + |x|
    return step * np.abs(values).reshape(-1) + (step / 255 + 1.03 / 32768) * 32768
