"""A decision that is made again and again, and timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WAITING = (10, 100, 1000, 10_000)


@dataclass(frozen=True)
class Bench:
    """``decide`` is timed. ``before`` makes its argument, ``after`` lays out anew; it is given argument and answer."""

    decide: Callable[[Any], Any]
    before: Callable[[], Any] = lambda: None
    after: Callable[[Any, Any], object] = lambda asked, answer: None

    def seconds(self, samples: int, most_seconds: float) -> list[float]:
        """CPU time of each of so many decisions; fewer, but no less than three, once ``most_seconds`` have passed.

        The first one is left out: it does what has come up while the bench was laid out.
        """
        self._once()
        found: list[float] = []
        until = time.perf_counter() + most_seconds
        while len(found) < samples and (len(found) < 3 or time.perf_counter() < until):
            found.append(self._once())
        return found

    def _once(self) -> float:
        asked = self.before()
        begin = time.thread_time()
        answer = self.decide(asked)
        taken = time.thread_time() - begin
        self.after(asked, answer)
        return taken


@dataclass(frozen=True)
class Decision:
    """``make(size, rng)`` lays out a bench; ``barred``: it has to keep to the bar at its largest size."""

    name: str
    grows_with: str
    make: Callable[[int, random.Random], Bench]
    sizes: tuple[int, ...] = WAITING
    barred: bool = True


class Clock:
    """Seconds that pass from decision to decision."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now
