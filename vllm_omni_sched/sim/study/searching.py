"""Search over a function of one number, each evaluation of which is a run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edge:
    """Point at which a condition stops to hold.

    ``holds``: the largest value at which it did, 0 if at none; ``fails``: the smallest above at which it did not, None
    if at none; ``monotone``: no tried value that held lies above one that did not.
    """

    holds: float
    fails: float | None
    monotone: bool
    tried: tuple[tuple[float, bool], ...]


def largest(holds: Callable[[float], bool], start: float, precision: float, doublings: int, step: float = 2.0) -> Edge:
    """Return the largest value that holds, by steps and bisection.

    1. From ``start`` it goes up by factors of ``step`` while the value holds. If ``step`` is 2 or more, it stops
       when a value and the next one both fail: one failure may be chance, which a higher rate that holds shows.
    2. If none of these holds, it goes down until a value holds: by ``step``, then by 2 if that is more.
    3. Between the largest that held and the next that failed it bisects, by the geometric mean, until they are within
       ``precision`` of each other.

    Args:
        holds: called once for each value.
        precision: relative precision of the answer.
        doublings: most steps up, and most steps down.
    """
    asked: dict[float, bool] = {}

    def ask(value: float) -> bool:
        if value not in asked:
            asked[value] = holds(value)
        return asked[value]

    value = start
    for _ in range(doublings):
        if not ask(value) and (step < 2 or not ask(step * value)):
            break
        value *= step
    if not any(asked.values()):
        value, down = start, step
        for _ in range(doublings):
            value /= down
            if ask(value):
                break
            down = min(down * down, 2.0) if step < 2 else step
    low = max((one for one, held in asked.items() if held), default=0.0)
    above = [one for one, held in asked.items() if not held and one > low]
    high = min(above, default=None)
    while low and high is not None and high > low * (1 + precision):
        middle = math.sqrt(low * high)
        if ask(middle):
            low = middle
        else:
            high = middle
    monotone = not any(held and not asked[less] for one, held in asked.items() for less in asked if less < one)
    return Edge(low, high, monotone, tuple(sorted(asked.items())))


def needed(factors: Sequence[float], attainment: float) -> float:
    """Return the smallest factor that suffices for that fraction of the requests; ``inf`` without requests."""
    if not factors:
        return math.inf
    ordered = sorted(factors)
    return ordered[max(math.ceil(attainment * len(ordered) - 1e-9) - 1, 0)]
