"""Choice of the wanted frames of a stream, one at a time. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_omni_sched.config.errors import ConfigError

_SLACK = 1e-6  # of a frame's time: containers round it


@dataclass(frozen=True)
class Sampling:
    """A sampling rule: every n-th frame, or a number of frames per second; every frame by default.

    Raises:
        ConfigError: ``every`` is below 1, ``fps`` is not positive, or both are given.
    """

    every: int = 1
    fps: float | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"sampling: every must be at least 1, got {self.every}")
        if self.fps is not None and not (self.fps > 0 and math.isfinite(self.fps)):
            raise ConfigError(f"sampling: fps must be positive, got {self.fps}")
        if self.fps is not None and self.every > 1:
            raise ConfigError("sampling: give every or fps, not both")


class Sampler:
    """Decides which frames of one stream are wanted.

    1. The first frame is always wanted.
    2. By ``every``: frames 0, n, 2n, …
    3. By ``fps``: the first frame at or after each tick of 1 / fps seconds since the first; one frame serves all ticks
       that have passed, so that a gap in the stream is not caught up.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._next_seconds = -math.inf

    def wants(self, number: int, seconds: float) -> bool:
        """Return whether a frame is wanted; call it for each frame, in display order.

        Args:
            number: number of the frame, from 0, in display order.
            seconds: time since the first frame.
        """
        fps = self._sampling.fps
        if fps is None:
            return number % self._sampling.every == 0
        if seconds + _SLACK < self._next_seconds:
            return False
        self._next_seconds = (math.floor((seconds + _SLACK) * fps) + 1) / fps
        return True
