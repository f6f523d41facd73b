"""Sort requests that wait before a gate into lanes whose requests can be released at the same moments."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from vllm_omni_sched.graph.order import Key, Placed, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.resource.gate_types import GateRequest


class Traits(NamedTuple):
    """Common properties of the requests of one lane. ``size``: number of binary digits of their units."""

    low: bool
    size: int
    needs: Hashable


def traits_of(request: GateRequest) -> Traits:
    return Traits(request.low, request.units.bit_length(), request.needs)


@dataclass
class Entry:
    """A waiting request with its arrival number and arrival time."""

    request: GateRequest
    number: int
    came: float


class First(NamedTuple):
    """The first request of a lane that finds room, and its sort key for comparison with other lanes."""

    key: Key
    request_id: str
    lane: "Lane"


class Lane:
    """Requests of the same traits, in order; O(log n) for each request added or removed.

    1. Of requests whose units have the same number of digits, either all find room or none does, except in at most
       one lane: there the first one that does is searched in order.
    2. Where all find room, one that shares a key with the last one may come first (rule 2 of `WaitingQueue`).
    """

    def __init__(self, traits: Traits, order: WaitingOrder) -> None:
        self.traits = traits
        self._queue = WaitingQueue(order)
        self._entries: dict[str, Entry] = {}
        self._ages: list[tuple[int, str]] = []  # by arrival; entries of removed requests are skipped
        self._next: Placed | None = None
        self._first: First | None = None  # cached until a request is added or removed, or time changes a key
        self._revision = 0  # revision of the queue when `_first` was cached
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
        """Remove a released request; if it was the next in order, a request that shares a key with it may follow."""
        if self._next is not None and self._next.request.request_id == request_id:
            self._queue.take(self._next)
        else:
            self._queue.remove(request_id)
        self._next = self._first = None
        del self._entries[request_id]

    def first(self, now: float, units: float) -> First | None:
        """Return the first request that fits in so many units, None if none does."""
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
        """Return the request to release from this lane: ``first``, or one that shares a key with the last released."""
        if self._most > units:
            return first.request_id
        self._next = self._queue.peek(now)
        assert self._next is not None  # ``first`` is in here
        return self._next.request.request_id

    def count(self, now: float, units: float, enough: int) -> int:
        """Return how many requests fit in so many units, counting no further than ``enough``."""
        if self._least > units:
            return 0
        if self._most <= units:
            return min(len(self), enough)
        return sum(1 for _, _ in zip(range(enough), self._fitting(now, units), strict=False))

    def came(self, now: float, units: float) -> float | None:
        """Return the arrival time of the oldest request that fits in so many units, None if none does."""
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
