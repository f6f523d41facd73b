"""From which link speed down does compressing what stages send each other save time, and how much of it?"""

from __future__ import annotations

from typing import Any

import numpy as np

RAW, OURS = "raw", "ours"
VARIANTS = {RAW: {"mode": "off"}, OURS: {"mode": "auto"}}
"""Options of compression. ``auto`` is told the speed of the link, as routing measures it."""
LINKS = {"25 MB/s": 25e6, "100 MB/s": 100e6, "400 MB/s": 400e6, "1600 MB/s": 1600e6}
"""Bytes per second."""


def hidden_states(rng: np.random.Generator) -> Any:
    """Hidden states as a decoder leaves them: bfloat16, (256, 2048), channels of widely different size."""
    import torch

    scale = np.exp(rng.normal(0.0, 1.0, 2048))
    return torch.from_numpy((rng.normal(0.0, 1.0, (256, 2048)) * scale).astype(np.float32)).to(torch.bfloat16)


def ids(rng: np.random.Generator) -> Any:
    """Token ids as torch has them: int64, by Zipf's law over a vocabulary of 151,936."""
    return np.minimum(rng.zipf(1.1, 131_072), 151_935).astype(np.int64)


def images(rng: np.random.Generator) -> Any:
    """Pixels as a processor makes them: float32 (3, 320, 320), normalised 8 bits; a smooth, noisy scene."""
    y, x = np.mgrid[0:320, 0:320] / 320
    waves = [np.sin(2 * np.pi * (fx * x + fy * y) + phase) for fx, fy, phase in rng.uniform(0, 6, (9, 3))]
    scene = np.stack([sum(waves[3 * channel : 3 * channel + 3]) for channel in range(3)]) * 30 + 128
    bits = np.clip(np.rint(scene + rng.normal(0, 2, scene.shape)), 0, 255)
    mean, deviation = np.array([0.48, 0.46, 0.41]), np.array([0.27, 0.26, 0.28])
    return ((bits / 255 - mean[:, None, None]) / deviation[:, None, None]).astype(np.float32)


def sound(rng: np.random.Generator) -> Any:
    """PCM as a vocoder leaves it: int16 at 24 kHz, 20 s; tones of a voice under an envelope, and a little noise."""
    at = np.arange(20 * 24_000) / 24_000
    envelope = np.clip(np.sin(2 * np.pi * 2.1 * at + rng.uniform(0, 6)), 0, None) ** 2
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * at)
    voice = sum(np.sin(2 * np.pi * np.cumsum(pitch) / 24_000 * harmonic) / harmonic for harmonic in range(1, 12))
    return np.clip(envelope * voice * 6000 + rng.normal(0, 12, at.size), -32768, 32767).astype(np.int16)


KINDS = {"hidden states, bf16": hidden_states, "ids, int64": ids, "images, fp32": images, "PCM, int16": sound}
