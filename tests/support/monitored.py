"""Simulate a stage of several servers under changing load for tests of monitoring: seeded, in simulated time.

Loads per second: a step to fourfold and back, ramps, a day in an hour, bursts of tenfold. Service times are lognormal
or gamma, and grow with how many are served at once.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

LOADS: dict[str, Callable[[float], float]] = {
    "steady": lambda now: 2.0,
    "steps": lambda now: 6.0 if 1200 <= now % 2400 < 1800 else 1.5,
    "ramp": lambda now: 0.5 + 6 * (now % 3600) / 3600,
    "day": lambda now: 3.0 + 2.7 * math.sin(2 * math.pi * now / 3600),
    "bursts": lambda now: 10.0 if now % 600 < 20 else 1.0,
}


@dataclass(frozen=True)
class Happening:
    """``enter`` and ``leave`` of a request, or ``look``: nothing happened, a time to check."""

    at: float
    what: Literal["enter", "leave", "look"]
    request_id: str
    service_seconds: float
    waiting: int
    running: int


def stage(
    load: str,
    rng: random.Random,
    seconds: float,
    servers: int = 8,
    service_seconds: float = 0.6,
    sigma: float = 0.5,
    slow_down: float = 0.05,
    look_seconds: float = 5.0,
    hang_at: float = math.inf,
    stand_at: float = math.inf,
) -> Iterator[Happening]:
    """Return the events of the stage, in order.

    ``slow_down``: how much each running request slows one that starts.
    ``hang_at``: the first request to start after that never ends. ``stand_at``: after that nothing ends.
    """
    rate = LOADS[load]
    most = 10.0
    queue: list[tuple[str, float]] = []
    running: list[tuple[float, str, float]] = []
    now, number, hung, stuck = 0.0, 0, False, 0
    arrival, look = rng.expovariate(most), look_seconds
    while True:
        end = running[0][0] if running else math.inf
        now = min(arrival, end, look)
        if now > seconds:
            return
        if now == look:
            look += look_seconds
            yield Happening(now, "look", "", 0.0, len(queue), len(running) + stuck)
            continue
        if now == arrival:
            arrival = now + rng.expovariate(most)
            if rng.random() * most >= rate(now):  # thinning (Lewis and Shedler, 1979)
                continue
            number += 1
            queue.append((str(number), now))
            what, who, took = "enter", str(number), 0.0
        else:
            _, who, began = heapq.heappop(running)
            what, took = "leave", now - began
        while queue and len(running) + stuck < servers:
            starting, _ = queue.pop(0)
            takes = rng.lognormvariate(math.log(service_seconds), sigma) * (1 + slow_down * len(running))
            if now >= stand_at or (now >= hang_at and not hung):
                hung, stuck = True, stuck + 1
            else:
                heapq.heappush(running, (now + takes, starting, now))
        if now >= stand_at:
            stuck += len(running)
            running.clear()
        yield Happening(now, what, who, took, len(queue), len(running) + stuck)  # type: ignore[arg-type]
