"""Pictures and sound made from a number: the same number is the same picture in every process."""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLES_PER_FRAME = 1280  # 80 ms at 16 kHz, what VoxtralRealtime calls a frame


def picture(number: int, side: int = 28) -> Any:
    """Return an RGB image of `side` × `side` random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def sound(number: int, frames: int) -> list[np.ndarray]:
    """`frames` arrays of `SAMPLES_PER_FRAME` 16-bit samples: noise of changing loudness and colour."""
    rng = np.random.default_rng(number)
    pieces = []
    for _ in range(frames):
        noise = rng.normal(size=SAMPLES_PER_FRAME)
        width = int(rng.integers(1, 16))
        smooth = np.convolve(noise, np.ones(width) / width, mode="same")
        pieces.append((rng.uniform(500, 8000) * smooth).clip(-32768, 32767).astype(np.int16))
    return pieces


def as_float(samples: np.ndarray) -> np.ndarray:
    """16-bit samples as float32 in [-1, 1), the way vLLM's realtime endpoint decodes them."""
    return samples.astype(np.float32) / 32768.0
