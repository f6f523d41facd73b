"""Which replica has what a request needs in its cache already.

It knows what was sent where, as far as this process saw it. How much load affinity may cost is not decided here.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import chain, islice
from typing import Generic, TypeVar

from vllm_omni_sched.errors import ConfigError

Replica = TypeVar("Replica", bound=Hashable)


class AffinityBook(Generic[Replica]):
    """What was sent to which replica: item hashes, prefix and conversation ids, users.

    1. A key at a replica is an entry. Noting it again makes it the newest; the one noted longest ago goes when there
       are more than ``capacity``. Looking changes nothing.
    2. A key has a weight: what it costs to make its content where it is not, in any one unit. One that is not
       noted anywhere it was looked for weighs the mean of the entries, 1 if there are none.
    3. It believes what it was told: what a replica's own cache has let go it does not know.

    O(1) for each key and replica.

    Raises:
        ConfigError: ``capacity`` is below 1.
    """

    def __init__(self, capacity: int = 65536) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity must be 1 or more, got {capacity}; to follow no affinity, turn it off")
        self.capacity = capacity
        self._weights: OrderedDict[tuple[Replica, str], float] = OrderedDict()  # noted longest ago first
        self._at: dict[Replica, set[str]] = {}
        self._holders: dict[str, dict[Replica, None]] = {}  # of a key, in the order in which they were noted
        self._total = 0.0

    def __len__(self) -> int:
        """Entries: pairs of a replica and a key."""
        return len(self._weights)

    def note(self, replica: Replica, keys: Iterable[str], weight: float = 1.0) -> None:
        """A request with these keys, each of this weight, was sent there.

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
        """It died, or its cache was emptied."""
        for key in list(self._at.get(replica, ())):
            self._drop(replica, key)

    def holders(self, keys: Iterable[str], most: int | None = None) -> list[Replica]:
        """The replicas that have something of ``keys``; of each key the ``most`` that were sent it last, None: all."""
        found = (islice(reversed(self._holders.get(key, {})), most) for key in sorted(set(keys)))
        return list(dict.fromkeys(chain.from_iterable(found)))

    def warm(self, keys: Iterable[str], replicas: Iterable[Replica]) -> dict[Replica, float]:
        """The part of the weight of ``keys`` that each replica has, from 0 to 1; 0 without keys."""
        shares = dict.fromkeys(replicas, 0.0)
        total = 0.0
        unknown = max(0.0, self._total) / len(self._weights) if self._weights else 1.0  # rounding may take it below 0
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
