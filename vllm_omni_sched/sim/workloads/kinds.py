"""Generate requests: production traffic of ServeGen's published statistics, questions about videos, queueing theory."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.sim.work import Clip, Item
from vllm_omni_sched.sim.workloads.base import (
    Arrival,
    Counts,
    Quantiles,
    ServedOptions,
    client_times,
    contents,
    endless,
    gamma_times,
    skewed,
    spread,
)

TEXT_TOKENS = Quantiles(((0.5, 106), (0.9, 1914), (0.99, 3064), (1, 16384)), mean=572)
OUTPUT_TOKENS = Quantiles(((0.5, 100), (0.9, 264), (0.99, 587), (1, 2048)), mean=130)
IMAGE_TOKENS = Quantiles(((0.5, 540), (0.9, 1224), (0.99, 1271), (1, 1280)), mean=650)
IMAGES = Counts(
    {0: 0.006, 1: 0.798, 2: 0.066, 3: 0.076, 4: 0.021}  # published; the rest so that P99 is 9 and the mean 1.59
    | spread(range(5, 10), 0.024)
    | spread(range(10, 50), 0.009, mean=20.0)
)

_CLIENTS, _LARGEST_CLIENTS, _LARGEST_PART = 35, 4, 0.49
_CV_PARTS, _CVS = (0.0, 0.49, 0.5, 0.9, 1.0), (0.6, 0.99, 1.01, 4.87, 7.0)
_ORDER = [(5 + 9 * at) % _CLIENTS for at in range(_CLIENTS)]  # by CV: large clients neither at one end, nor the median

_SOURCE = (
    "ServeGen mm-image, rate-weighted over 35 clients ({what}); inter-arrival times are Gamma; values between the "
    "quoted quantiles, the largest ones and CVs below the median are assumed, sizes are independent of each other"
)


class ServeGenText:
    """Generates text-only prompts: the text and output tokens of ServeGen's mm-image, by its clients.

    1. Text tokens: mean 572, P50 106, P90 1914, P99 3064. Output tokens: mean 130, P50 100, P90 264, P99 587.
    2. 35 clients with Gamma gaps. The largest 4 have 49 % of the traffic; rates fall as 1/rank^s.
    3. Coefficients of variation, weighted by traffic: 51 % above 1, P50 1.01, P90 4.87.

    Source: ServeGen (arXiv 2505.09999), category mm-image.
    """

    source = _SOURCE.format(what="text and output tokens, clients")

    def __init__(self, options: ServedOptions) -> None:
        self.rate = options.rate
        self._options = options

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        times, texts, outputs = rng.spawn(3)
        sizes = zip(
            endless(lambda n: TEXT_TOKENS.draw(texts, n)),
            endless(lambda n: OUTPUT_TOKENS.draw(outputs, n)),
            strict=True,
        )
        sla = self._options.sla
        for (at, client), (text, output) in zip(self.times(times), sizes, strict=False):
            yield Arrival(at, text, output, (), sla, client)

    def times(self, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
        """Yield the time and the client of each arrival."""
        return client_times(rng, clients(self.rate))


class ServeGenImages(ServeGenText):
    """Prompts with images, by the clients and with the text of `ServeGenText`.

    1. Images per request: 0, 1, 2, 3, 4 with .006, .798, .066, .076, .021; mean 1.59, P90 3, P99 9, at most 49.
    2. Tokens of an image: mean 650, P50 540, P90 1224, P99 1271. All images differ.

    Source: ServeGen (arXiv 2505.09999), category mm-image.
    """

    source = _SOURCE.format(what="images, tokens per image, text and output tokens, clients")

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        text, counts, tokens, names = rng.spawn(4)
        images = endless(lambda n: IMAGES.draw(counts, n))
        embeds = endless(lambda n: IMAGE_TOKENS.draw(tokens, n))
        content = contents(names)
        for at, text_tokens, output, _, sla, client, *_ in super().arrivals(text):
            items = tuple([Item("image", next(embeds), next(content)) for _ in range(next(images))])
            yield Arrival(at, text_tokens, output, items, sla, client)


def clients(rate: float) -> list[tuple[float, float]]:
    """Return (rate, coefficient of variation) of each client, largest first."""
    parts = skewed(_CLIENTS, _LARGEST_CLIENTS, _LARGEST_PART)
    cvs = [1.0] * _CLIENTS
    before = 0.0
    for rank in _ORDER:
        cvs[rank] = float(np.exp(np.interp(before + parts[rank] / 2, _CV_PARTS, np.log(_CVS))))
        before += parts[rank]
    return [(rate * part, cvs[rank]) for rank, part in enumerate(parts)]


class PoissonOptions(ServedOptions):
    """Options of ``poisson``."""

    service: Literal["deterministic", "exponential"] = Field(
        "exponential", description="Distribution of output tokens."
    )
    output_tokens: int = Field(1000, ge=1, description="Mean output tokens.")
    arrival_cv: float = Field(
        1.0, ge=0, le=20, description="Coefficient of variation of Gamma gaps; 1: Poisson, 0: evenly spaced."
    )
    text_tokens: int = Field(0, ge=0, description="Prompt tokens; 0: service is output alone.")


class Poisson:
    """Poisson arrivals of requests with output tokens only.

    ``deterministic``: all have the mean. ``exponential``: geometric from 1, which is exponential up to a token.

    Source: Kleinrock, Queueing Systems I, 1975.
    """

    source = "Poisson arrivals (or Gamma gaps), output tokens of a textbook's distribution; nothing is measured"

    def __init__(self, options: PoissonOptions) -> None:
        self.rate = options.rate
        self._options = options

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        options = self._options
        times, service = rng.spawn(2)
        outputs = endless(lambda n: self._outputs(service, n))
        for at in gamma_times(times, options.rate, options.arrival_cv):
            yield Arrival(at, options.text_tokens, next(outputs), (), options.sla)

    def _outputs(self, rng: np.random.Generator, number: int) -> Any:
        mean = self._options.output_tokens
        if self._options.service == "deterministic":
            return np.full(number, mean)
        return rng.geometric(1 / mean, number)


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
    pieces: int = Field(
        1, ge=1, description="Items that a client sends each clip as, with equal numbers of frames; 1: the whole clip."
    )

    @field_validator("frames")
    @classmethod
    def _some(cls, value: list[int]) -> list[int]:
        if min(value) < 1:
            raise ValueError("frames must be 1 or more each")
        return value

    @model_validator(mode="after")
    def _whole_frames(self) -> "ClipsOptions":
        for wanted in self.frames:
            if wanted % self.pieces:
                raise ValueError(f"option 'pieces' must divide every number of 'frames': {self.pieces} and {wanted}")
        return self


class VideoClips:
    """Clips of the shape of MMVU: 15 s of 360p, 30 or 60 frames of which go to the model with a question.

    1. 60 frames are about 26K tokens: 433 each.
    2. The lengths of questions, frames per second and the GOP are assumed. Outputs are ServeGen's mm-image.
    3. A clip that is asked about again has the same ``content``, with any number of frames.
    4. A clip in ``pieces`` is as many shorter clips in one request.

    Source: MMVU (arXiv 2501.12380) as used by UnifiedServe (arXiv 2512.17574).
    """

    source = (
        "clips in the shape of MMVU, 15 s of 360p with 30 or 60 frames, about 26K tokens for 60; questions, GOP and "
        "frame rate are assumed; outputs as ServeGen's mm-image"
    )

    def __init__(self, options: ClipsOptions) -> None:
        self.rate = options.rate
        self._options = options
        self._clips = [
            Clip(
                options.seconds / options.pieces,
                options.fps,
                options.width,
                options.height,
                options.gop_frames,
                wanted // options.pieces,
                options.codec,
            )
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
            clip, name = self._clips[next(kind)], next(content)
            embeds = clip.wanted * options.tokens_per_frame
            first = name * options.pieces
            items = tuple([Item("video", embeds, first + piece, clip) for piece in range(options.pieces)])
            yield Arrival(at, next(text), next(output), items, options.sla)
