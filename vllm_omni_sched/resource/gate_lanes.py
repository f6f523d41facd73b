"""Those who wait before a gate, sorted into lanes whose requests are able to go at the same moments."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from vllm_omni_sched.graph.order import Key, Placed, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.resource.gate_types import GateRequest


class Traits(NamedTuple):
    """What the requests of one lane have in common. ``size``: binary digits of their units."""

    low: bool
    size: int
    needs: Hashable


def traits_of(request: GateRequest) -> Traits:
    return Traits(request.low, request.units.bit_length(), request.needs)


@dataclass
class Entry:
    """One that waits: its request, and when it came, by number and by clock."""

    request: GateRequest
    number: int
    came: float


class First(NamedTuple):
    """The first of a lane that finds room, and its place among the first of all lanes."""

    key: Key
    request_id: str
    lane: "Lane"


class Lane:
    """Requests of the same traits, in order; O(log n) for each that comes or goes.

    1. Of requests whose units have the same number of digits either all find room, or none, but for one lane at most:
       there the first that does is looked for in order.
    2. Where all find room, one that shares something with the last one may come first (rule 2 of `WaitingQueue`).
    """

    def __init__(self, traits: Traits, order: WaitingOrder) -> None:
        self.traits = traits
        self._queue = WaitingQueue(order)
        self._entries: dict[str, Entry] = {}
        self._ages: list[tuple[int, str]] = []  # who came first; those who have left are skipped
        self._next: Placed | None = None
        self._first: First | None = None  # of all, until somebody comes or goes, or time changes a key
        self._revision = 0  # of the queue's keys when it was looked for
        self._least = 1 << (traits.size - 1) if traits.size else 0
        self._most = (1 << traits.size) - 1

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, entry: Entry, now: float) -> None:
        name = entry.request.request_id
        self._queue.push(entry.request.waiting, now)
        self._entries[name] = entry
        self._first = None
        heappush(self._ages, (entry.number, name))
        if len(self._ages) > 2 * len(self._entries) + 64:
            self._ages = [(one.number, each) for each, one in self._entries.items()]
            heapify(self._ages)

    def remove(self, request_id: str) -> None:
        self._queue.remove(request_id)
        del self._entries[request_id]
        self._first = None

    def take(self, request_id: str) -> None:
        """`remove` what is released; if its turn had come, what shares something with it may follow."""
        if self._next is not None and self._next.request.request_id == request_id:
            self._queue.take(self._next)
        else:
            self._queue.remove(request_id)
        self._next = self._first = None
        del self._entries[request_id]

    def first(self, now: float, units: float) -> First | None:
        """The first that fits in so many units."""
        if self._least > units:
            return None
        if self._most > units:
            one = next(self._fitting(now, units), None)
            return None if one is None else First(self._queue.key(one.request_id), one.request_id, self)
        if self._first is None or self._queue.changes_at <= now or self._queue.revision != self._revision:
            head = self._queue.head(now)
            self._first = None if head is None else First(head[0], head[1].request_id, self)
            self._revision = self._queue.revision
        return self._first

    def next(self, first: First, now: float, units: float) -> str:
        """Who goes when the turn is this lane's: its first, or one that goes along with who went last."""
        if self._most > units:
            return first.request_id
        self._next = self._queue.peek(now)
        assert self._next is not None  # ``first`` is in here
        return self._next.request.request_id

    def count(self, now: float, units: float, enough: int) -> int:
        """How many fit in so many units; no more than ``enough`` are counted."""
        if self._least > units:
            return 0
        if self._most <= units:
            return min(len(self), enough)
        return sum(1 for _, _ in zip(range(enough), self._fitting(now, units), strict=False))

    def came(self, now: float, units: float) -> float | None:
        """When the first came that fits in so many units."""
        if self._least > units:
            return None
        if self._most > units:
            return min((self._entries[one.request_id].came for one in self._fitting(now, units)), default=None)
        while self._ages:
            number, name = self._ages[0]
            entry = self._entries.get(name)
            if entry is not None and entry.number == number:
                return entry.came
            heappop(self._ages)
        return None

    def _fitting(self, now: float, units: float) -> Iterator[WaitingRequest]:
        return (one for one in self._queue.ordered(now) if self._entries[one.request_id].request.units <= units)
