"""Choose the encoding to evict: the one that is worth least.

After Greedy-Dual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-
Frequency Caching Policy", HP Labs HPL-98-69R1, 1998): frequency x cost / size. Its inflation
term, which lets old frequencies fade, is replaced by exponential decay of each use. Uses are weighted
forward in time (Cormode et al., "Forward Decay", ICDE 2009), so that time alone changes no order
and a heap stays valid.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import EvictionOrder


class EvictReason(str, Enum):
    """Reason for the choice of a victim."""

    LEAST_WORTH = "least_worth"
    OLDEST = "oldest"


@dataclass(frozen=True)
class Encoding:
    """Properties of an encoder output.

    ``encode_seconds``: time to encode it again.
    ``log_uses``: log2 of its decayed number of uses, weighted forward: as of time 0 of the clock.

    Raises:
        ValueError: the size is not above 0, or the time is negative or not finite.
    """

    mm_hash: str
    num_bytes: int
    encode_seconds: float
    log_uses: float = -math.inf

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise ValueError(f"{self.mm_hash}: num_bytes must be 1 or more, got {self.num_bytes}")
        if not 0 <= self.encode_seconds < math.inf:
            raise ValueError(f"{self.mm_hash}: encode_seconds must be finite and >= 0, got {self.encode_seconds}")

    def log_worth(self) -> float:
        """Return log2 of cost x uses / size, as of time 0; -inf if the cost is 0."""
        if self.encode_seconds == 0:
            return -math.inf
        return math.log2(self.encode_seconds) + self.log_uses - math.log2(self.num_bytes)


@dataclass(frozen=True)
class Victim:
    """An encoding to evict, and the reason."""

    encoding: Encoding
    reason: EvictReason


class Uses:
    """Decayed counts of uses: a use counts 1 now and 1/2 after ``half_life_seconds``.

    Raises:
        ConfigError: the half-life is not above 0.
    """

    def __init__(self, half_life_seconds: float) -> None:
        if not 0 < half_life_seconds < math.inf:
            raise ConfigError(f"half_life_seconds must be above 0, got {half_life_seconds}")
        self.half_life_seconds = half_life_seconds

    def add(self, log_uses: float, now: float) -> float:
        """Return ``log_uses`` after one more use at ``now``."""
        new = now / self.half_life_seconds
        if log_uses == -math.inf:
            return new
        high, low = max(log_uses, new), min(log_uses, new)
        return high + math.log2(1 + 2 ** (low - high))

    def count(self, log_uses: float, now: float) -> float:
        """Return the decayed number of uses as of ``now``."""
        return float(2 ** (log_uses - now / self.half_life_seconds))


class WorthIndex:
    """Encodings in a cache, and the order of their eviction. O(log n) per operation, amortised.

    1. `add` and `use` count a use. An encoding is held by each of its users until `release`; only
       one that is not held can be evicted.
    2. The victim is the freeable encoding with the least worth, encode seconds x decayed uses / bytes;
       with ``order=AGE`` the one that became freeable first. Ties go to what became freeable first.
    3. The uses of the last ``history`` evicted hashes are remembered, so that a returning item is not new.

    Raises:
        ConfigError: ``history`` is negative, or the half-life is not above 0.
    """

    def __init__(
        self, order: EvictionOrder = EvictionOrder.WORTH, half_life_seconds: float = 300.0, history: int = 4096
    ) -> None:
        if history < 0:
            raise ConfigError(f"history must be 0 or more, got {history}")
        self.order = order
        self.history = history
        self.uses = Uses(half_life_seconds)
        self._held: dict[str, int] = {}
        self._encodings: dict[str, Encoding] = {}
        self._since: dict[str, int] = {}  # freeable encodings: their place in the order of becoming freeable
        self._turn = 0
        self._heap: list[tuple[float, int, str]] = []
        self._ghosts: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._encodings)

    def __contains__(self, mm_hash: object) -> bool:
        return mm_hash in self._encodings

    @property
    def num_freeable(self) -> int:
        """Return the number of encodings that can be evicted."""
        return len(self._since)

    @property
    def num_remembered(self) -> int:
        """Return the number of evicted hashes that are remembered."""
        return len(self._ghosts)

    def add(self, mm_hash: str, num_bytes: int, encode_seconds: float, now: float) -> Encoding:
        """Add an encoding that was just made, held by its first user.

        Raises:
            ValueError: the encoding is there already, or its size or time is out of range.
        """
        if mm_hash in self._encodings:
            raise ValueError(f"{mm_hash} is in the cache already; call use()")
        log_uses = self.uses.add(self._ghosts.get(mm_hash, -math.inf), now)
        return self._enter(Encoding(mm_hash, num_bytes, encode_seconds, log_uses))

    def enter(self, encoding: Encoding, now: float) -> Encoding:
        """Add an encoding, including the uses that it already has."""
        return self._enter(self._used(encoding, now))

    def _enter(self, used: Encoding) -> Encoding:
        mm_hash = used.mm_hash
        self._ghosts.pop(mm_hash, None)
        self._encodings[mm_hash] = used
        self._held[mm_hash] = 1
        return used

    def use(self, mm_hash: str, now: float, encode_seconds: float | None = None) -> Encoding:
        """Add a user; ``encode_seconds``, if given, updates the encoding's cost.

        Raises:
            KeyError: the encoding is not in the cache.
            ValueError: the time is out of range.
        """
        encoding = self._encodings[mm_hash]
        if encode_seconds is not None:
            encoding = replace(encoding, encode_seconds=encode_seconds)
        self._encodings[mm_hash] = used = self._used(encoding, now)
        self._held[mm_hash] += 1
        self._since.pop(mm_hash, None)
        return used

    def release(self, mm_hash: str) -> None:
        """Remove one user; after the last one, the encoding can be evicted.

        Raises:
            KeyError: the encoding is not in the cache.
            ValueError: the encoding has no user.
        """
        self._let_go(mm_hash, 1)

    def release_all(self, mm_hash: str) -> None:
        """Remove all users, so that the encoding can be evicted.

        Raises:
            KeyError: the encoding is not in the cache.
            ValueError: the encoding has no user.
        """
        self._let_go(mm_hash, self._held[mm_hash])

    def _let_go(self, mm_hash: str, users: int) -> None:
        if self._held[mm_hash] == 0:
            raise ValueError(f"{mm_hash} is released more often than it was used")
        self._held[mm_hash] -= users
        if self._held[mm_hash] == 0:
            self._may_go(mm_hash)

    def _may_go(self, mm_hash: str) -> None:
        self._turn += 1
        self._since[mm_hash] = self._turn
        key = self._encodings[mm_hash].log_worth() if self.order is EvictionOrder.WORTH else 0.0
        heappush(self._heap, (key, self._turn, mm_hash))
        if len(self._heap) > 2 * len(self._since) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def next_victim(self) -> Victim | None:
        """Return the encoding that `evict` would evict; None when all are held."""
        while self._heap and not self._is_live(self._heap[0]):
            heappop(self._heap)
        if not self._heap:
            return None
        reason = EvictReason.LEAST_WORTH if self.order is EvictionOrder.WORTH else EvictReason.OLDEST
        return Victim(self._encodings[self._heap[0][2]], reason)

    def evict(self) -> Victim | None:
        """Evict the next victim and remember its uses; return None when all are held."""
        victim = self.next_victim()
        if victim is not None:
            mm_hash = victim.encoding.mm_hash
            del self._encodings[mm_hash], self._held[mm_hash], self._since[mm_hash]
            self._ghosts[mm_hash] = victim.encoding.log_uses
            if len(self._ghosts) > self.history:
                self._ghosts.popitem(last=False)
        return victim

    def _is_live(self, entry: tuple[float, int, str]) -> bool:
        return self._since.get(entry[2]) == entry[1]

    def _used(self, encoding: Encoding, now: float) -> Encoding:
        log_uses = self.uses.add(encoding.log_uses, now)
        return Encoding(encoding.mm_hash, encoding.num_bytes, encoding.encode_seconds, log_uses)
