"""What is asked, from a seed. Pure.

Shapes after ServeGen's `mm-image` (rate-weighted over 35 clients), scaled to tiny models: images per request, tokens
per image, output lengths, Gamma arrivals with a coefficient of variation above 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

FEW_IMAGES = ((0, 0.006), (1, 0.798), (2, 0.066), (3, 0.076), (4, 0.021))
P99_IMAGES, MOST_IMAGES = 9, 49
TOKENS_PER_IMAGE = ((0.0, 100.0), (0.5, 540.0), (0.9, 1224.0), (0.99, 1271.0), (1.0, 1271.0))  # (quantile, tokens)
OUTPUT_MEDIAN, OUTPUT_SIGMA = 100.0, 0.757  # log-normal; gives P90 264 and P99 582, published are 264 and 587
ARRIVAL_CV = 2.0


@dataclass(frozen=True)
class Request:
    """``thinks`` and ``says``: tokens of the first and of the second stage; ``at``: seconds after the first one.

    ``prompt``: a text, or ``{"prompt_token_ids": […]}``. ``stream``: outputs of the first stage have new tokens alone.
    """

    name: str
    prompt: Any
    thinks: int
    says: int
    at: float = 0.0
    sla: str | None = None
    stream: bool = False

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def bursts(number: int, contents: int, rng: Random) -> list[Request]:
    """Return one burst in which contents repeat, the k-th most frequent one with weight 1/k; all come at once."""
    mark = rng.randrange(1 << 30)
    kinds = [
        (f"Content {mark}-{kind} " * (1 + kind % 5), 20 + kind % 9, 20 + 3 * kind % 17) for kind in range(contents)
    ]
    chosen = rng.choices(range(contents), [1 / (1 + kind) for kind in range(contents)], k=number)
    return [Request(f"{mark}-{index}", *kinds[kind]) for index, kind in enumerate(chosen)]


def skewed(number: int, rng: Random, *, tokens_per_step: float, most: int) -> list[Request]:
    """Requests that come at once, each with as many steps in the second stage as its images ask for."""
    mark = rng.randrange(1 << 30)
    found = []
    for index in range(number):
        tokens = sum(_between(TOKENS_PER_IMAGE, rng.random()) for _ in range(images(rng)))
        steps = min(max(round(tokens / tokens_per_step), 2), most)
        found.append(Request(f"{mark}-{index}", f"Request {mark}-{index}.", 1, steps))
    return found


def alike(number: int, rng: Random, *, thinks: int, says: int) -> list[Request]:
    """Requests of about one size, no two of them equal; all come at once."""
    mark = rng.randrange(1 << 30)
    return [
        Request(f"{mark}-{index}", f"Request {mark}-{index} asks. " * (1 + index % 3), thinks, says + index % 7)
        for index in range(number)
    ]


def sized(number: int, tokens: int, rng: Random, *, stream: bool) -> list[Request]:
    """Different prompts of so many tokens, all at once; short answers, so that requests come and go."""
    mark = rng.randrange(1 << 30)
    prompts = [{"prompt_token_ids": rng.choices(range(100, 500), k=tokens)} for _ in range(number)]
    return [Request(f"{mark}-{index}", one, 24, 24, stream=stream) for index, one in enumerate(prompts)]


def classes(number: int, high: int, rng: Random, *, scale: float, most: int) -> list[Request]:
    """Requests with output lengths of ServeGen's, ``high`` of them of the high class; all at once (see `spread`)."""
    mark = rng.randrange(1 << 30)
    chosen = set(rng.sample(range(number), high))
    found = []
    for index in range(number):
        says = round(rng.lognormvariate(math.log(OUTPUT_MEDIAN * scale), OUTPUT_SIGMA))
        sla = "realtime" if index in chosen else "batch"
        prompt = f"Request {mark}-{index} asks. " * (1 + index % 3)
        found.append(Request(f"{mark}-{index}", prompt, 12, min(max(says, 2), most), sla=sla))
    return found


def spread(requests: Sequence[Request], seconds: float, rng: Random) -> list[Request]:
    """Return the same requests with Gamma gaps that add up to ``seconds``."""
    shape = 1 / ARRIVAL_CV**2
    gaps = [rng.gammavariate(shape, 1.0) for _ in requests]
    at, found = 0.0, []
    for request, gap in zip(requests, gaps, strict=True):
        at += gap * seconds / sum(gaps)
        found.append(Request(request.name, request.prompt, request.thinks, request.says, at, request.sla))
    return found


def heavy_clients(number: int, rng: Random, *, steps: float, most: int) -> list[Request]:
    """Return the load of the unit tests of balancing.

    One request in seven is of a heavy client and asks 16 times as much; sizes are Pareto (a = 2), the least ``steps``.
    """
    mark = rng.randrange(1 << 30)
    sizes = [(16 if rng.random() < 0.15 else 1) * rng.paretovariate(2) for _ in range(number)]
    return [
        Request(f"{mark}-{index}", f"Request {mark}-{index}.", 1, min(max(round(steps * size), 2), most))
        for index, size in enumerate(sizes)
    ]


def images(rng: Random) -> int:
    """Draw the number of images of one request."""
    u = rng.random()
    for count, probability in FEW_IMAGES:
        if u < probability:
            return count
        u -= probability
    few = 1 - sum(probability for _, probability in FEW_IMAGES)
    if u < few - 0.01:
        return rng.randint(len(FEW_IMAGES), P99_IMAGES)
    return round(P99_IMAGES * (MOST_IMAGES / P99_IMAGES) ** rng.random())


def _between(table: Sequence[tuple[float, float]], u: float) -> float:
    """Return the u-quantile of a distribution given by some of its quantiles."""
    for (low, value), (high, next_value) in itertools.pairwise(table):
        if u <= high:
            return value + (next_value - value) * (u - low) / (high - low)
    return table[-1][1]
