"""The videos that are loaded, encoded once by the encoders in PyAV's wheel, and kept in `.cache/videos`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from benchmarks.harness.priority import kept_priority
from benchmarks.harness.provenance import ROOT

CACHE = ROOT / ".cache" / "videos"


@dataclass(frozen=True)
class Clip:
    """A synthetic video: a panning landscape, a disc that crosses it, and sensor noise."""

    name: str
    codec: str = "libx264"
    seconds: int = 60
    width: int = 1280
    height: int = 720
    gop: int = 60
    seed: int = 0
    options: tuple[tuple[str, str], ...] = (("preset", "medium"), ("crf", "23"))

    @property
    def path(self) -> Path:
        return CACHE / f"{self.name}.mp4"


LONG = {
    clip.name: clip
    for clip in (
        Clip("h264-gop60"),
        Clip("h264-gop30", gop=30),
        Clip("h264-gop250", gop=250),
        Clip("h264-8mbit", options=(("preset", "medium"), ("b", "8000k"))),
        Clip("h264-no-b", options=(("preset", "medium"), ("crf", "23"), ("bf", "0"))),
        Clip("hevc-gop60", "libx265", options=(("preset", "fast"), ("x265-params", "log-level=error:keyint=60"))),
        Clip("av1-gop60", "libsvtav1", seconds=30, options=(("preset", "10"),)),
    )
}
SHORT = [Clip(f"h264-360p-{n}", seconds=15, width=640, height=360, seed=n) for n in range(4)]
TINY = Clip("h264-tiny", seconds=1, width=160, height=96)
FPS = 30


def encoded(clip: Clip) -> Path:
    """Return the clip's file; encode it if it does not exist."""
    if not clip.path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = clip.path.with_name(f"{clip.name}.{os.getpid()}.mp4")
        try:
            _encode(clip, unfinished)
            unfinished.rename(clip.path)
        finally:
            unfinished.unlink(missing_ok=True)
    return clip.path


def _encode(clip: Clip, path: Path) -> None:
    with kept_priority(), av.open(str(path), "w") as container:
        # no key frames of x264's own choice
        options = dict(clip.options) | ({"sc_threshold": "0"} if clip.codec == "libx264" else {})
        stream = container.add_stream(clip.codec, rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.gop_size = clip.gop
        stream.time_base = Fraction(1, FPS)
        for picture in pictures(clip):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def pictures(clip: Clip):  # type: ignore[no-untyped-def]
    """Yield the frames, uint8 of shape (height, width, 3)."""
    random = np.random.default_rng(clip.seed)
    height, width = clip.height, clip.width
    texture = landscape(random, height + 256, width + 256)
    noise = random.normal(0.0, 1.5, (16, height, width, 1)).round().astype(np.int16)
    rows, columns = np.ogrid[:height, :width]
    for i in range(clip.seconds * FPS):
        y, x = int(128 + 120 * np.cos(i / 37)), int(128 + 120 * np.sin(i / 50))
        picture = np.clip(texture[y : y + height, x : x + width] + noise[i % 16], 0, 255).astype(np.uint8)
        across, down = width / 2 + width / 3 * np.sin(i / 20), height / 2 + height / 3 * np.cos(i / 13)
        picture[(rows - down) ** 2 + (columns - across) ** 2 < (height / 8) ** 2] = (255, 60, i % 256)
        yield picture


def landscape(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return an image with detail at all scales, its amplitude in proportion to the scale, as in photographs."""
    image = np.full((height, width, 3), 128.0, np.float32)
    for octave in range(1, 8):
        scale = 1 << octave
        cells = random.normal(0.0, 1.0, (height // scale + 2, width // scale + 2, 3)).astype(np.float32)
        size = (cells.shape[1] * scale, cells.shape[0] * scale)
        layers = [np.asarray(Image.fromarray(cells[..., c]).resize(size, Image.Resampling.BICUBIC)) for c in range(3)]
        image += 0.35 * scale * np.stack(layers, axis=-1)[:height, :width]
    return image.clip(0, 255).astype(np.int16)
