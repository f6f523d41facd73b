"""Open-loop arrivals: who comes when, with what. Pure, from a seed.

Shapes after ServeGen's `mm-image` (rate-weighted over 35 clients): images per request, inter-arrival times from a Gamma
distribution with a coefficient of variation above 1. Lengths are scaled to what a tiny model on two cores can do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IMAGES = ((1, 2, 3, 4, 9), (0.800, 0.070, 0.080, 0.030, 0.020))  # per request, with probabilities
IMAGE_CV = 2.0
TEXT_RATE, IMAGE_RATE = 2.0, 0.4  # requests a second at load 1


@dataclass(frozen=True)
class Arrival:
    """A request that arrives `at` seconds from the start; `image_seeds` has one number for each of its images."""

    at: float
    prompt_words: int
    image_seeds: tuple[int, ...]
    output_tokens: int

    @property
    def kind(self) -> str:
        return "image" if self.image_seeds else "text"


def arrivals(
    load: float, seconds: float, seed: int, *, text_tokens: int = 300, frames: int = 0, pictures: int = 0
) -> list[Arrival]:
    """Requests of `seconds`, by arrival time. Every image is another one, unless `pictures` says otherwise.

    Args:
        load: multiplies both rates.
        text_tokens: output tokens of a text request.
        frames: when not 0, one request with so many small pictures comes in the middle.
        pictures: when not 0, images are drawn from so many, the n-th one in proportion to 1/n, as from a catalogue.
    """
    random = np.random.default_rng((seed, round(load * 1000)))
    found = []
    for at in _times(random, TEXT_RATE * load, 1.0, seconds):
        found.append(Arrival(at, int(random.integers(5, 60)), (), text_tokens))
    for at in _times(random, IMAGE_RATE * load, IMAGE_CV, seconds):
        count = int(random.choice(IMAGES[0], p=np.array(IMAGES[1])))
        seeds = tuple(int(s) for s in random.integers(0, 1 << 31, count))
        if pictures:
            shares = 1.0 / np.arange(1, pictures + 1)
            seeds = tuple(int(s) for s in random.choice(pictures, count, p=shares / shares.sum()))
        found.append(Arrival(at, int(random.integers(5, 30)), seeds, int(random.integers(20, 60))))
    if frames:
        seeds = tuple(int(s) for s in random.integers(0, 1 << 31, frames))
        found.append(Arrival(seconds / 2, 10, seeds, 40))
    return sorted(found, key=lambda arrival: arrival.at)


def _times(random: np.random.Generator, rate: float, cv: float, seconds: float) -> list[float]:
    """Return arrival times with Gamma-distributed gaps of mean 1/rate."""
    shape = 1.0 / cv**2
    times: list[float] = []
    at = 0.0
    while True:
        at += float(random.gamma(shape, 1.0 / (rate * shape)))
        if at >= seconds:
            return times
        times.append(at)
