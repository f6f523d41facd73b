"""Generate questions about short videos."""

from collections.abc import Iterator

import numpy as np
from pydantic import Field, field_validator

from vllm_omni_sched.sim.work import Clip, Item
from vllm_omni_sched.sim.workloads.base import Arrival, ServedOptions
from vllm_omni_sched.sim.workloads.distributions import contents, endless, gamma_times
from vllm_omni_sched.sim.workloads.production import OUTPUT_TOKENS


class ClipsOptions(ServedOptions):
    """Options of ``video-clips``."""

    cv: float = Field(1.0, ge=0, le=20, description="Coefficient of variation of Gamma gaps; 1: Poisson.")
    frames: list[int] = Field([30, 60], min_length=1, description="Wanted frames of a clip, with equal probability.")
    tokens_per_frame: int = Field(433, ge=1, description="Encoder embeddings of a frame.")
    seconds: float = Field(15.0, gt=0, allow_inf_nan=False, description="Length of a clip.")
    fps: float = Field(30.0, gt=0, le=1000, description="Frames per second in the file.")
    width: int = Field(640, ge=1, description="Width of the frames, in pixels.")
    height: int = Field(360, ge=1, description="Height of the frames, in pixels.")
    gop_frames: int = Field(250, ge=1, description="Frames from one key frame to the next.")
    codec: str = Field("h264", min_length=1, description="Codec of the file.")
    question_tokens: int = Field(60, ge=1, description="Mean text tokens; uniform from half to one and a half of it.")
    distinct: int = Field(0, ge=0, description="Number of different clips, with equal probability; 0: all are new.")

    @field_validator("frames")
    @classmethod
    def _some(cls, value: list[int]) -> list[int]:
        if min(value) < 1:
            raise ValueError("frames must be 1 or more each")
        return value


class VideoClips:
    """Clips of the shape of MMVU: 15 s of 360p, 30 or 60 frames of which go to the model with a question.

    1. 60 frames are about 26K tokens: 433 each.
    2. The lengths of questions, frames per second and the GOP are assumed. Outputs are ServeGen's mm-image.
    3. A clip that is asked about again has the same ``content``, with any number of frames.

    Source: MMVU (arXiv 2501.12380) as used by UnifiedServe (arXiv 2512.17574).
    """

    thinnable = True
    source = (
        "clips in the shape of MMVU, 15 s of 360p with 30 or 60 frames, about 26K tokens for 60; questions, GOP and "
        "frame rate are assumed; outputs as ServeGen's mm-image"
    )

    def __init__(self, options: ClipsOptions) -> None:
        self.rate = options.rate
        self._options = options
        self._clips = [
            Clip(options.seconds, options.fps, options.width, options.height, options.gop_frames, wanted, options.codec)
            for wanted in options.frames
        ]

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        options = self._options
        times, kinds, names, questions, outputs = rng.spawn(5)
        kind = endless(lambda n: kinds.integers(len(self._clips), size=n))
        known = options.distinct
        content = endless(lambda n: names.integers(known, size=n)) if known else contents(names)
        low = max(1, options.question_tokens // 2)
        text = endless(lambda n: questions.integers(low, 2 * options.question_tokens - low + 1, size=n))
        output = endless(lambda n: OUTPUT_TOKENS.draw(outputs, n))
        for at in gamma_times(times, options.rate, options.cv):
            clip = self._clips[next(kind)]
            item = Item("video", clip.wanted * options.tokens_per_frame, next(content), clip)
            yield Arrival(at, next(text), next(output), (item,), options.sla)
