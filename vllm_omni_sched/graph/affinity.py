"""Group requests by affinity: next to each other in the waiting order, and on the replica that has their data.

Only what this process sent is known. How much load affinity may cost is decided elsewhere.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

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


Replica = TypeVar("Replica", bound=Hashable)


class AffinityBook(Generic[Replica]):
    """Records which keys were sent to which replica: item hashes, prefix and conversation ids, users.

    1. A key at a replica is an entry. Noting it again makes it the newest; the oldest entry is dropped when there
       are more than ``capacity``. Lookups change nothing.
    2. A key has a weight: the cost of making its content anew, in any one unit. A key that no queried replica
       has weighs the mean of the entries, 1 if there are none.
    3. Evictions from a replica's own cache are not seen.

    O(1) for each key and replica.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self.capacity = capacity
        self._weights: OrderedDict[tuple[Replica, str], float] = OrderedDict()  # oldest first
        self._at: dict[Replica, set[str]] = {}
        self._holders: dict[str, dict[Replica, None]] = {}  # by key, in the order in which they were noted
        self._total = 0.0

    def __len__(self) -> int:
        """Return the number of entries: pairs of a replica and a key."""
        return len(self._weights)

    def note(self, replica: Replica, keys: Iterable[str], weight: float = 1.0) -> None:
        """Record that a request with these keys, each of this weight, was sent to the replica.

        Raises:
            ValueError: the weight is not a finite number above 0.
        """
        if not 0 < weight < float("inf"):
            raise ValueError(f"weight must be finite and above 0, got {weight}")
        for key in keys:
            self._drop(replica, key)
            self._weights[replica, key] = weight
            self._at.setdefault(replica, set()).add(key)
            self._holders.setdefault(key, {})[replica] = None
            self._total += weight
            if len(self._weights) > self.capacity:
                self._drop(*next(iter(self._weights)))

    def forget(self, replica: Replica) -> None:
        """Drop all entries of a replica that died or whose cache was emptied."""
        for key in list(self._at.get(replica, ())):
            self._drop(replica, key)

    def holders(self, keys: Iterable[str], most: int | None = None) -> list[Replica]:
        """Return the replicas that have any of ``keys``; for each key the ``most`` recent ones, None: all."""
        found = (islice(reversed(self._holders.get(key, {})), most) for key in sorted(set(keys)))
        return list(dict.fromkeys(chain.from_iterable(found)))

    def has_any(self, replica: Replica, keys: Iterable[str]) -> bool:
        """Return whether the replica has any of ``keys``."""
        return any((replica, key) in self._weights for key in keys)

    def warm(self, keys: Iterable[str], replicas: Iterable[Replica]) -> dict[Replica, float]:
        """Return the fraction of the weight of ``keys`` that each replica has, from 0 to 1; 0 without keys."""
        shares = dict.fromkeys(replicas, 0.0)
        total = 0.0
        unknown = max(0.0, self._total) / len(self._weights) if self._weights else 1.0  # rounding may make it negative
        for key in set(keys):
            found = {one: self._weights[one, key] for one in shares if (one, key) in self._weights}
            weight = max(found.values(), default=unknown)
            total += weight
            for one in found:
                shares[one] += weight
        return {one: min(1.0, share / total) if total else 0.0 for one, share in shares.items()}

    def _drop(self, replica: Replica, key: str) -> None:
        weight = self._weights.pop((replica, key), None)
        if weight is None:
            return
        self._total = self._total - weight if self._weights else 0.0
        holders = self._holders[key]
        del holders[replica]
        if not holders:
            del self._holders[key]
        keys = self._at[replica]
        keys.discard(key)
        if not keys:
            del self._at[replica]
