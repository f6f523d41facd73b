"""Records of the messages that one process has put, with their tiers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import islice

from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.keyed_lock import KeyedLock


class Owner:
    """Holder of a message that receivers cannot get now."""

    NOBODY, MOVER, CALLER = range(3)


@dataclass(eq=False)
class Item:
    """A message in flight; ``nbytes`` as its tier holds it."""

    id: int
    edge: Edge
    key: str
    name: bytes
    pool: str
    nbytes: int
    tier: int
    put_at: float
    longest: tuple[str, int] | None
    owner: int = Owner.NOBODY
    troubled: bool = False  # it could not be looked at, which was logged

    @classmethod
    def of(cls, message: Message, pool: str, tier: int, held_bytes: int, now: float) -> Item:
        return cls(message.id, message.edge, message.key, message.name, pool, held_bytes, tier, now, message.longest)


class Ledger(KeyedLock):
    """Records with one entry for each message in flight. The lock is never held while bytes are copied."""

    def __init__(self, pools: list[set[str]]) -> None:
        super().__init__()
        self._pools = pools  # of each tier
        self._items: OrderedDict[bytes, Item] = OrderedDict()  # the message checked longest ago comes first
        self._by_key: dict[str, set[bytes]] = {}
        self.used: Counter[tuple[int, str]] = Counter()  # bytes, by tier and pool
        self.lying: Counter[int] = Counter()  # messages, by tier
        self.waiting: Counter[Edge] = Counter()  # messages in flight, as far as is known
        self.waiting_bytes: Counter[Edge] = Counter()
        self.progress = 0  # messages gone: it tells whether there may be room again

    def __len__(self) -> int:
        return len(self._items)

    def get(self, name: bytes) -> Item | None:
        return self._items.get(name)

    def of_key(self, key: str) -> list[bytes]:
        """Return the names of messages under a key, on all edges, in a fixed order."""
        with self._lock:
            return sorted(self._by_key.get(key, ()))

    def of_edge(self, edge: Edge) -> list[Item]:
        with self._lock:
            return [item for item in self._items.values() if item.edge == edge]

    def all(self) -> list[Item]:
        with self._lock:
            return list(self._items.values())

    def next(self, limit: int | None) -> list[Item]:
        """Return the messages that were checked longest ago, and mark them as checked."""
        with self._lock:
            some = list(islice(self._items.values(), limit))
            for item in some:
                self._items.move_to_end(item.name)
        return some

    def enter(self, item: Item) -> None:
        """Record a message that was put; no other message of its name is recorded."""
        with self._lock:
            self._items[item.name] = item
            self._by_key.setdefault(item.key, set()).add(item.name)
            self._count(item, 1)
            self.waiting[item.edge] += 1
            self.waiting_bytes[item.edge] += item.nbytes

    def move(self, item: Item, tier: int, nbytes: int) -> None:
        """Record that a message is in another tier."""
        with self._lock:
            self._count(item, -1)
            self.waiting_bytes[item.edge] += nbytes - item.nbytes
            item.tier, item.nbytes = tier, nbytes
            self._count(item, 1)

    def leave(self, item: Item) -> bool:
        """Remove a message that is in no tier any more; return False if it was not recorded."""
        with self._lock:
            if self._items.get(item.name) is not item:
                return False
            del self._items[item.name]
            names = self._by_key[item.key]
            names.discard(item.name)
            if not names:
                del self._by_key[item.key]
            self._count(item, -1)
            self.waiting[item.edge] -= 1
            self.waiting_bytes[item.edge] -= item.nbytes
            self.progress += 1
            return True

    def pool_of(self, tier: int, pool: str) -> str:
        """Return the pool of a tier for messages of a pool."""
        return pool if pool in self._pools[tier] else ""

    def _count(self, item: Item, sign: int) -> None:
        self.used[item.tier, self.pool_of(item.tier, item.pool)] += sign * item.nbytes
        self.lying[item.tier] += sign
