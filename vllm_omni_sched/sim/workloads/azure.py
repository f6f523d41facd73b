"""Generate image requests of a large service, most of which have one image and some have hundreds."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from pydantic import Field

from vllm_omni_sched.sim.work import Item
from vllm_omni_sched.sim.workloads.base import Arrival, ServedOptions
from vllm_omni_sched.sim.workloads.draws import Counts, contents, endless, spread
from vllm_omni_sched.sim.workloads.servegen import IMAGE_TOKENS, OUTPUT_TOKENS, TEXT_TOKENS
from vllm_omni_sched.sim.workloads.times import Bursts, gamma_times

IMAGES = Counts(
    {1: 0.66}
    | spread(range(2, 5), 0.05, mean=2.6)
    | spread(range(5, 10), 0.15)
    | spread(range(10, 26), 0.06, mean=15.0)
    | spread(range(26, 101), 0.03, mean=50.0)
    | spread(range(101, 480), 0.01, mean=220.0)
    | spread(range(480, 521), 0.04)
)


class AzureOptions(ServedOptions):
    """Options of ``azure-lmm``."""

    max_images: int = Field(
        520, ge=1, description="Most images of a request, which the server accepts; larger requests are cut to it."
    )
    burst_ratio: float = Field(5.0, ge=1, le=100, description="The rate in a burst relative to that between bursts.")
    burst_seconds: float = Field(60.0, gt=0, allow_inf_nan=False, description="Mean length of a burst.")
    burst_every_seconds: float = Field(
        1800.0, gt=0, allow_inf_nan=False, description="Mean time from the end of a burst to the next."
    )


class AzureImages:
    """Image requests of Azure's multimodal models, 2025, in bursts.

    1. Images per request: 66 % have 1, 71 % up to 4, 86 % up to 9, 92 % up to 25, 95 % up to 100, and 4 % about 500.
    2. Bursts at random times, of random lengths, in which the rate is ``burst_ratio`` times that between them. The
       mean over all time is ``rate``. (Only a peak of bursts is published, 22,500 images a minute; options are ours.)
    3. Tokens of images, of text and of outputs are not published: those of ServeGen are used.

    Source: Azure LMM inference traces 2025, as read off the figures of ModServe (arXiv 2502.00937), +/- 2 points.
    """

    thinnable = True
    source = (
        "Azure LMM 2025, images per request read off figures (+/- 2 points); tokens of images, text and outputs are "
        "ServeGen's mm-image; the length and height of bursts are assumed"
    )

    def __init__(self, options: AzureOptions) -> None:
        self.rate = options.rate
        self._options = options

    def arrivals(self, random: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        options = self._options
        times, counts, tokens, names, texts, outputs = random.spawn(6)
        images = endless(lambda n: np.minimum(IMAGES.draw(counts, n), options.max_images))
        embeds = endless(lambda n: IMAGE_TOKENS.draw(tokens, n))
        text = endless(lambda n: TEXT_TOKENS.draw(texts, n))
        output = endless(lambda n: OUTPUT_TOKENS.draw(outputs, n))
        content = contents(names)
        for at in self._times(times):
            items = tuple(Item("image", *one) for one in islice(zip(embeds, content, strict=False), next(images)))
            yield Arrival(at, next(text), next(output), items, options.sla)

    def _times(self, random: np.random.Generator) -> Iterator[float]:
        options = self._options
        part = options.burst_seconds / (options.burst_seconds + options.burst_every_seconds)
        peak = options.rate * options.burst_ratio / (1 + part * (options.burst_ratio - 1))
        when, whether, burst_random = random.spawn(3)
        bursts = Bursts(burst_random, options.burst_every_seconds, options.burst_seconds)
        chances = endless(whether.random)
        for at in gamma_times(when, peak):
            chance = next(chances)
            if bursts.at(at) or chance * options.burst_ratio < 1:
                yield at
