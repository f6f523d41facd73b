"""Generate arrival times: Gamma gaps, several clients, bursts."""

import math
from collections.abc import Iterator
from heapq import merge

import numpy as np

from vllm_omni_sched.sim.workloads.draws import endless


def gamma_times(random: np.random.Generator, rate: float, cv: float = 1.0) -> Iterator[float]:
    """Yield times with Gamma gaps of that mean rate and coefficient of variation; 1: a Poisson process, 0: even gaps.

    The process has been running before time 0: the first time is the rest of a gap, so the rate is the
    same from the start. (With an ordinary first gap, (cv^2 - 1) / 2 arrivals too many would come early: Cox, Renewal
    Theory, 1962.)
    """
    if cv == 0:
        at = float(random.random()) / rate
        while True:
            yield at
            at += 1.0 / rate
    shape = 1.0 / cv**2
    scale = 1.0 / (rate * shape)
    at = float(random.random() * random.gamma(shape + 1, scale))
    for gap in endless(lambda number: random.gamma(shape, scale, number)):
        yield at
        at += gap


def client_times(random: np.random.Generator, clients: list[tuple[float, float]]) -> Iterator[tuple[float, int]]:
    """Yield (time, client) of several clients that each have a (rate, coefficient of variation)."""

    def one(number: int, generator: np.random.Generator, rate: float, cv: float) -> Iterator[tuple[float, int]]:
        return ((at, number) for at in gamma_times(generator, rate, cv))

    generators = random.spawn(len(clients))
    return merge(*(one(number, generators[number], *client) for number, client in enumerate(clients)))


class Bursts:
    """Random bursts of random lengths; times must be requested in order.

    ``every_seconds``: mean from the end of a burst to the begin of the next; ``seconds``: mean length; exponential.
    """

    def __init__(self, random: np.random.Generator, every_seconds: float, seconds: float) -> None:
        self._random = random
        self._means = (every_seconds, seconds)
        self._on = bool(random.random() < seconds / (seconds + every_seconds))
        self._until = random.exponential(self._means[self._on])

    def at(self, when: float) -> bool:
        """Return whether there is a burst at that time; times must not go back."""
        while when >= self._until:
            self._on = not self._on
            self._until += self._random.exponential(self._means[self._on])
        return self._on


def skewed(number: int, first: int, part: float) -> list[float]:
    """Return ``number`` fractions that sum to 1, the n-th as 1/n^s, with s such that the first ones sum to ``part``."""
    low, high = 0.0, 8.0
    ranks = np.arange(1, number + 1, dtype=float)
    weights = ranks
    for _ in range(60):
        middle = (low + high) / 2
        weights = ranks**-middle
        weights /= weights.sum()
        low, high = (middle, high) if math.fsum(weights[:first]) < part else (low, middle)
    return [float(weight) for weight in weights]
