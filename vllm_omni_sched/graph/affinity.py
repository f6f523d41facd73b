"""Move requests that share an affinity key next to each other, as far as deadlines allow."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

AFFINITY_ITEMS = 16
"""Number of a request's items that affinity looks at; further items add little information."""


class Move(NamedTuple):
    """The next position to serve, and whether it was moved ahead of another one."""

    position: int
    pulled: bool


def pull_together(
    keys: Sequence[frozenset[str]], costs: Sequence[float], spare: Sequence[float], classes: Sequence[Hashable]
) -> Iterator[Move]:
    """Yield each position once, with positions that share a key pulled up behind the first of them.

    1. Positions are served one by one; position ``i`` may start up to ``spare[i]`` seconds later than planned.
    2. A position is pulled up only past positions of its own class, and only if each of them has
       spare time for its cost on top of the costs of all that were pulled past it before.
       The cost of positions that were themselves pulled past others is counted too, which errs on the safe side.
    3. The first refusal ends the search for that key, so the whole takes O(n log n + keys).
    """
    positions: dict[str, list[int]] = {}
    for position, of_one in enumerate(keys):
        for key in of_one:
            positions.setdefault(key, []).append(position)
    tried = dict.fromkeys(positions, 0)
    least_spare = _RangeMin(spare)
    done = [False] * len(keys)
    pulled_cost = [0.0] * len(keys)
    outstanding = 0.0  # cost of pulled positions that have not been passed yet
    for leader in range(len(keys)):
        if done[leader]:
            outstanding = max(0.0, outstanding - pulled_cost[leader])
            continue
        done[leader] = True
        yield Move(leader, False)
        following = leader + 1
        for key in sorted(keys[leader]):
            mates = positions[key]
            while (at := tried[key]) < len(mates):
                mate = mates[at]
                if not done[mate]:
                    while following < mate and done[following]:
                        following += 1
                    between = least_spare(following, mate)
                    if classes[mate] != classes[leader] or (following < mate and between < outstanding + costs[mate]):
                        break
                    done[mate] = True
                    if following < mate:
                        pulled_cost[mate] = costs[mate]
                        outstanding += costs[mate]
                    yield Move(mate, following < mate)
                tried[key] = at + 1


class _RangeMin:
    """A sparse table that returns the smallest value of a range in O(1), after O(n log n) preparation."""

    def __init__(self, values: Sequence[float]) -> None:
        self._rows = [list(values)]
        width = 1
        while 2 * width <= len(values):
            row = self._rows[-1]
            self._rows.append(list(map(min, row, islice(row, width, None))))
            width *= 2

    def __call__(self, start: int, end: int) -> float:
        if start >= end:
            return float("inf")
        level = (end - start).bit_length() - 1
        row = self._rows[level]
        return min(row[start], row[end - (1 << level)])
