"""Generate loads that are made up: the benchmark ``mixed``, live sessions, queueing theory, questions about videos."""

import math
from collections.abc import Iterator
from heapq import merge
from itertools import count, islice
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.sim.work import Clip, Item
from vllm_omni_sched.sim.workloads.base import Arrival, ServedOptions, WorkloadOptions
from vllm_omni_sched.sim.workloads.distributions import Counts, contents, endless, gamma_times
from vllm_omni_sched.sim.workloads.production import OUTPUT_TOKENS

_BOS = 1  # a token before the words, which are about one token each
_TEXT_PART = 2.0 / 2.4  # of requests: 2.0 a second at load 1, beside 0.4 with images
_IMAGES = Counts({1: 0.80, 2: 0.07, 3: 0.08, 4: 0.03, 9: 0.02})
_IMAGE_CV = 2.0


class MixedOptions(ServedOptions):
    """Options of ``mixed``."""

    embeds: int = Field(64, ge=1, description="Encoder embeddings of an image.")
    text_output_tokens: int = Field(300, ge=1, description="Output tokens of a request without images.")
    frames: int = Field(0, ge=0, description="If not 0, one additional request with so many images.")
    frames_at_seconds: float = Field(30.0, ge=0, allow_inf_nan=False, description="Arrival time of that request.")


class MixedLoad:
    """The arrival law of ``benchmarks/mixed``, at ``rate`` / 2.4 times its load.

    1. 5 of 6 requests are text: Poisson, 5 to 59 words, ``text_output_tokens``.
    2. The others have images, mostly one: Gamma gaps with a coefficient of variation of 2, 5 to 29 words, 20 to 59
       output tokens.
    3. With ``frames``: a burst of so many images in one request of 10 words, with 40 output tokens.

    Source: ``benchmarks/mixed/workload.py``, after ServeGen's mm-image; lengths are scaled to a tiny model.
    """

    thinnable = True
    source = "the load of benchmarks/mixed, after ServeGen's mm-image with lengths of a tiny model; a token for a word"

    def __init__(self, options: MixedOptions) -> None:
        self.rate = options.rate
        self._options = options

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        options = self._options
        text, images, names = rng.spawn(3)
        content = contents(names)

        def with_images(at: float, count: int, words: int, output: int) -> Arrival:
            items = tuple(Item("image", options.embeds, one) for one in islice(content, count))
            return Arrival(at, words + _BOS, output, items, options.sla)

        pictures = (with_images(*drawn) for drawn in self._with_images(images))
        frames = (with_images(at, options.frames, 10, 40) for at in [options.frames_at_seconds] if options.frames)
        return merge(self._text(text), pictures, frames, key=lambda arrival: arrival.at)

    def _text(self, rng: np.random.Generator) -> Iterator[Arrival]:
        times, lengths = rng.spawn(2)
        words = endless(lambda n: lengths.integers(5, 60, size=n))
        for at in gamma_times(times, self.rate * _TEXT_PART):
            yield Arrival(at, next(words) + _BOS, self._options.text_output_tokens, (), self._options.sla)

    def _with_images(self, rng: np.random.Generator) -> Iterator[tuple[float, int, int, int]]:
        """Yield (time, images, words, output tokens)."""
        times, counts, lengths, outputs = rng.spawn(4)
        return zip(
            gamma_times(times, self.rate * (1 - _TEXT_PART), _IMAGE_CV),
            endless(lambda n: _IMAGES.draw(counts, n)),
            endless(lambda n: lengths.integers(5, 30, size=n)),
            endless(lambda n: outputs.integers(20, 60, size=n)),
            strict=False,
        )


_CLASS = "realtime"


class RealtimeOptions(WorkloadOptions):
    """Options of ``realtime``."""

    item_seconds: float = Field(0.08, gt=0, allow_inf_nan=False, description="A session sends an item this often.")
    session_items: int = Field(7500, ge=1, description="Mean items of a session; 7500 of 80 ms are ten minutes.")
    modality: str = Field("audio", min_length=1, description="Modality of the items.")
    embeds: int = Field(1, ge=1, description="Encoder embeddings of an item.")


class Realtime:
    """Live sessions: one item per ``item_seconds``, each a request of class ``realtime`` with one output token.

    1. ``rate`` counts items. There are always rate x item_seconds sessions, rounded, at least one.
    2. Sessions begin at random phases. The number of items of a session is geometric; when it ends, another ``client``
       takes its place. The rate is therefore exact up to the rounding.

    Source: streaming audio in frames of 80 ms (12.5 Hz); lengths of sessions are assumed.
    """

    thinnable = False
    source = "live sessions with one item per 80 ms, as streaming audio at 12.5 Hz; lengths of sessions are assumed"

    def __init__(self, options: RealtimeOptions) -> None:
        self._options = options
        self._sessions = max(1, round(options.rate * options.item_seconds))
        self.rate = self._sessions / options.item_seconds

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        options = self._options
        phases, lengths, names = rng.spawn(3)
        length = endless(lambda n: lengths.geometric(1 / options.session_items, size=n))
        content = contents(names)
        slots = np.sort(phases.random(self._sessions)).tolist()
        left = [next(length) for _ in slots]
        who = list(range(len(slots)))
        for period in count():  # times are products, so that they do not drift
            for slot, phase in enumerate(slots):
                item = Item(options.modality, options.embeds, next(content))
                yield Arrival((period + phase) * options.item_seconds, 0, 1, (item,), _CLASS, who[slot])
                left[slot] -= 1
                if not left[slot]:
                    left[slot], who[slot] = next(length), who[slot] + len(slots)


class PoissonOptions(ServedOptions):
    """Options of ``poisson``."""

    service: Literal["deterministic", "exponential", "hyperexponential"] = Field(
        "exponential", description="Distribution of output tokens."
    )
    output_tokens: int = Field(1000, ge=1, description="Mean output tokens.")
    service_cv: float = Field(2.0, gt=1, le=20, description="Coefficient of variation of a hyperexponential service.")
    arrival_cv: float = Field(
        1.0, ge=0, le=20, description="Coefficient of variation of Gamma gaps; 1: Poisson, 0: evenly spaced."
    )
    text_tokens: int = Field(0, ge=0, description="Prompt tokens; 0: service is output alone.")

    @model_validator(mode="after")
    def _both_sorts_have_tokens(self) -> "PoissonOptions":
        if self.service == "hyperexponential" and self.output_tokens <= 2 * _more_often(self.service_cv):
            least = math.floor(2 * _more_often(self.service_cv)) + 1
            raise ValueError(
                f"option 'output_tokens' must be {least} or more for such a service, got {self.output_tokens}"
            )
        return self


class Poisson:
    """Poisson arrivals of requests with output tokens only.

    1. ``deterministic``: all have the mean. ``exponential``: geometric from 1, which is exponential up to a token.
    2. ``hyperexponential``: one of two geometric sorts, each with half of all tokens ("balanced means"), so
       that the coefficient of variation is ``service_cv``, up to a token.

    Source: Kleinrock, Queueing Systems I, 1975; balanced means: Allen, Probability, Statistics and Queueing Theory,
    1990.
    """

    thinnable = True
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
        if self._options.service == "exponential":
            return rng.geometric(1 / mean, number)
        part = _more_often(self._options.service_cv)
        parts = np.where(rng.random(number) < part, part, 1 - part)
        return rng.geometric(np.minimum(1.0, 2 * parts / mean))


def _more_often(cv: float) -> float:
    """Return the probability of the shorter of two sorts with balanced means."""
    return (1 + math.sqrt((cv**2 - 1) / (cv**2 + 1))) / 2


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

    thinnable = True
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
