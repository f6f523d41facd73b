"""Generate production traffic from published statistics: text and images of ServeGen, images of Azure."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from pydantic import Field

from vllm_omni_sched.sim.work import Item
from vllm_omni_sched.sim.workloads.base import Arrival, ServedOptions
from vllm_omni_sched.sim.workloads.distributions import (
    Bursts,
    Counts,
    Quantiles,
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


class ServeGenOptions(ServedOptions):
    """Options of ``servegen-mm-image`` and ``text``."""

    clients: bool = Field(
        True, description="Arrivals by 35 clients of unlike rate and burstiness; false: one Poisson process."
    )


class ServeGenText:
    """Generates text-only prompts: the text and output tokens of ServeGen's mm-image, by its clients.

    1. Text tokens: mean 572, P50 106, P90 1914, P99 3064. Output tokens: mean 130, P50 100, P90 264, P99 587.
    2. 35 clients with Gamma gaps. The largest 4 have 49 % of the traffic; rates fall as 1/rank^s.
    3. Coefficients of variation, weighted by traffic: 51 % above 1, P50 1.01, P90 4.87.

    Source: ServeGen (arXiv 2505.09999), category mm-image.
    """

    thinnable = True
    source = _SOURCE.format(what="text and output tokens, clients")

    def __init__(self, options: ServeGenOptions) -> None:
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
        return client_times(rng, clients(self.rate) if self._options.clients else [(self.rate, 1.0)])


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


AZURE_IMAGES = Counts(
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

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        options = self._options
        times, counts, tokens, names, texts, outputs = rng.spawn(6)
        images = endless(lambda n: np.minimum(AZURE_IMAGES.draw(counts, n), options.max_images))
        embeds = endless(lambda n: IMAGE_TOKENS.draw(tokens, n))
        text = endless(lambda n: TEXT_TOKENS.draw(texts, n))
        output = endless(lambda n: OUTPUT_TOKENS.draw(outputs, n))
        content = contents(names)
        for at in self._times(times):
            items = tuple(Item("image", *one) for one in islice(zip(embeds, content, strict=False), next(images)))
            yield Arrival(at, next(text), next(output), items, options.sla)

    def _times(self, rng: np.random.Generator) -> Iterator[float]:
        options = self._options
        part = options.burst_seconds / (options.burst_seconds + options.burst_every_seconds)
        peak = options.rate * options.burst_ratio / (1 + part * (options.burst_ratio - 1))
        when, whether, burst_rng = rng.spawn(3)
        bursts = Bursts(burst_rng, options.burst_every_seconds, options.burst_seconds)
        chances = endless(whether.random)
        for at in gamma_times(when, peak):
            chance = next(chances)
            if bursts.at(at) or chance * options.burst_ratio < 1:
                yield at
