"""Record which replica has parts of a request in its cache already.

Only what this process sent is known. How much load affinity may cost is decided elsewhere.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import chain, islice
from typing import Generic, TypeVar

from vllm_omni_sched.errors import ConfigError

Replica = TypeVar("Replica", bound=Hashable)


class AffinityBook(Generic[Replica]):
    """Records which keys were sent to which replica: item hashes, prefix and conversation ids, users.

    1. A key at a replica is an entry. Noting it again makes it the newest; the oldest entry is dropped when there
       are more than ``capacity``. Lookups change nothing.
    2. A key has a weight: the cost of making its content anew, in any one unit. A key that no queried replica
       has weighs the mean of the entries, 1 if there are none.
    3. Evictions from a replica's own cache are not seen.

    O(1) for each key and replica.

    Raises:
        ConfigError: ``capacity`` is below 1.
    """

    def __init__(self, capacity: int = 65536) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity must be 1 or more, got {capacity}; to ignore affinity, turn it off")
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
