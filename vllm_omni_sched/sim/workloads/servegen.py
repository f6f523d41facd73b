"""Generate production traffic with and without images, from the statistics of ServeGen."""

from collections.abc import Iterator

import numpy as np
from pydantic import Field

from vllm_omni_sched.sim.work import Item
from vllm_omni_sched.sim.workloads.base import Arrival, ServedOptions
from vllm_omni_sched.sim.workloads.draws import Counts, Quantiles, contents, endless, spread
from vllm_omni_sched.sim.workloads.times import client_times, skewed

TEXT_TOKENS = Quantiles(((0.5, 106), (0.9, 1914), (0.99, 3064), (1, 16384)), mean=572)
OUTPUT_TOKENS = Quantiles(((0.5, 100), (0.9, 264), (0.99, 587), (1, 2048)), mean=130)
IMAGE_TOKENS = Quantiles(((0.5, 540), (0.9, 1224), (0.99, 1271), (1, 1280)), mean=650)
IMAGES = Counts(
    {0: 0.006, 1: 0.798, 2: 0.066, 3: 0.076, 4: 0.021}  # published; the rest so that P99 is 9 and the mean 1.59
    | spread(range(5, 10), 0.024)
    | spread(range(10, 50), 0.009, mean=20.0)
)

_CLIENTS, _FIRST, _THEIR_PART = 35, 4, 0.49
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
    """Text-only prompts: the text and output tokens of ServeGen's mm-image, by its clients.

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

    def arrivals(self, random: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        times, texts, outputs = random.spawn(3)
        sizes = zip(
            endless(lambda n: TEXT_TOKENS.draw(texts, n)),
            endless(lambda n: OUTPUT_TOKENS.draw(outputs, n)),
            strict=True,
        )
        sla = self._options.sla
        for (at, client), (text, output) in zip(self.times(times), sizes, strict=False):
            yield Arrival(at, text, output, (), sla, client)

    def times(self, random: np.random.Generator) -> Iterator[tuple[float, int]]:
        """Yield the time and the client of each arrival."""
        return client_times(random, clients(self.rate) if self._options.clients else [(self.rate, 1.0)])


class ServeGenImages(ServeGenText):
    """Prompts with images, by the clients and with the text of `ServeGenText`.

    1. Images per request: 0, 1, 2, 3, 4 with .006, .798, .066, .076, .021; mean 1.59, P90 3, P99 9, at most 49.
    2. Tokens of an image: mean 650, P50 540, P90 1224, P99 1271. All images differ.

    Source: ServeGen (arXiv 2505.09999), category mm-image.
    """

    source = _SOURCE.format(what="images, tokens per image, text and output tokens, clients")

    def arrivals(self, random: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        text, counts, tokens, names = random.spawn(4)
        images = endless(lambda n: IMAGES.draw(counts, n))
        embeds = endless(lambda n: IMAGE_TOKENS.draw(tokens, n))
        content = contents(names)
        for at, text_tokens, output, _, sla, client in super().arrivals(text):
            items = tuple([Item("image", next(embeds), next(content)) for _ in range(next(images))])
            yield Arrival(at, text_tokens, output, items, sla, client)


def clients(rate: float) -> list[tuple[float, float]]:
    """Return (rate, coefficient of variation) of each client, largest first."""
    parts = skewed(_CLIENTS, _FIRST, _THEIR_PART)
    cvs = [1.0] * _CLIENTS
    before = 0.0
    for rank in _ORDER:
        cvs[rank] = float(np.exp(np.interp(before + parts[rank] / 2, _CV_PARTS, np.log(_CVS))))
        before += parts[rank]
    return [(rate * part, cvs[rank]) for rank, part in enumerate(parts)]
