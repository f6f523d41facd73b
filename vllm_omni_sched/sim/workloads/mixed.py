"""Generate the load of the benchmark ``mixed``: text, and occasionally images."""

from collections.abc import Iterator
from heapq import merge
from itertools import islice

import numpy as np
from pydantic import Field

from vllm_omni_sched.sim.work import Item
from vllm_omni_sched.sim.workloads.base import Arrival, ServedOptions
from vllm_omni_sched.sim.workloads.draws import Counts, contents, endless
from vllm_omni_sched.sim.workloads.times import gamma_times

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

    def arrivals(self, random: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        options = self._options
        text, images, names = random.spawn(3)
        content = contents(names)

        def with_images(at: float, count: int, words: int, output: int) -> Arrival:
            items = tuple(Item("image", options.embeds, one) for one in islice(content, count))
            return Arrival(at, words + _BOS, output, items, options.sla)

        pictures = (with_images(*drawn) for drawn in self._with_images(images))
        frames = (with_images(at, options.frames, 10, 40) for at in [options.frames_at_seconds] if options.frames)
        return merge(self._text(text), pictures, frames, key=lambda arrival: arrival.at)

    def _text(self, random: np.random.Generator) -> Iterator[Arrival]:
        times, lengths = random.spawn(2)
        words = endless(lambda n: lengths.integers(5, 60, size=n))
        for at in gamma_times(times, self.rate * _TEXT_PART):
            yield Arrival(at, next(words) + _BOS, self._options.text_output_tokens, (), self._options.sla)

    def _with_images(self, random: np.random.Generator) -> Iterator[tuple[float, int, int, int]]:
        """Yield (time, images, words, output tokens)."""
        times, counts, lengths, outputs = random.spawn(4)
        return zip(
            gamma_times(times, self.rate * (1 - _TEXT_PART), _IMAGE_CV),
            endless(lambda n: _IMAGES.draw(counts, n)),
            endless(lambda n: lengths.integers(5, 30, size=n)),
            endless(lambda n: outputs.integers(20, 60, size=n)),
            strict=False,
        )
