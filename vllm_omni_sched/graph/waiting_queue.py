"""Keep the waiting order up to date as requests come and go."""

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from vllm_omni_sched.graph.order import NEVER_OVERTAKEN, Key, Placed, PlaceReason, WaitingOrder, WaitingRequest

MOST_MOVED = 4


class _Entry:
    """A waiting request with its present key and place, and when they change on their own."""

    __slots__ = ("changes_at", "key", "placed", "request")

    def __init__(self, request: WaitingRequest, order: WaitingOrder, now: float) -> None:
        self.request = request
        self.look(order, now)

    def look(self, order: WaitingOrder, now: float) -> None:
        """Update key and place."""
        self.key = order.key(self.request, now)
        self.placed = Placed(self.request, order.reason(self.key, self.request))
        self.changes_at = order.next_change(self.request, now)


class WaitingQueue:
    """Waiting requests in the order of `WaitingOrder`; O(log n) per operation, amortised.

    1. `peek` and `pop` return what ``order.plan(all waiting, now)[0]`` would if there were no affinity keys.
    2. After a request, one of its class that shares an affinity key with it comes next, if the request that
       would otherwise be next has not aged, and can still start in time behind all that were moved ahead of it. If that
       one has no deadline to meet, at most `MOST_MOVED` in a row are moved ahead of it.
    3. A key changes at most twice, when the request turns late and when it ages. A second heap
       holds these moments; a changed key is pushed again, and its old entry is skipped when it comes up.
    4. Skipped entries are removed once they outnumber the live ones.
    5. ``now`` never goes back: an earlier time counts as the latest one seen.
    """

    def __init__(self, order: WaitingOrder) -> None:
        self.order = order
        self._now = -math.inf
        self._entries: dict[str, _Entry] = {}
        self._keys: list[Key] = []
        self._changes: list[tuple[float, str]] = []
        self._sharing: dict[str, dict[str, None]] = {}  # affinity key -> requests that have it, oldest push first
        self._last: WaitingRequest | None = None  # popped last
        self._moved = 0  # requests moved ahead since the last one popped in its turn
        self._moved_seconds = 0.0  # their cost
        self.revision = 0
        """Number of keys that time has changed; cached reads of the queue stay valid while this number is the same."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def push(self, request: WaitingRequest, now: float) -> None:
        """Add a request.

        Raises:
            ValueError: a request with this id waits already.
        """
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id!r} waits already; remove it before it is pushed again")
        self._now = max(self._now, now)
        entry = _Entry(request, self.order, self._now)
        self._entries[request.request_id] = entry
        heappush(self._keys, entry.key)
        if entry.changes_at != math.inf:
            heappush(self._changes, (entry.changes_at, request.request_id))
        for shared in request.affinity:
            self._sharing.setdefault(shared, {})[request.request_id] = None

    def ordered(self, now: float) -> Iterator[WaitingRequest]:
        """Yield all requests, first to run first, without rule 2; O(log n) for each one taken from the iterator.

        Exhaust or drop the iterator before the queue changes.
        """
        self._advance(now)
        keys, seen = self._keys, set()
        frontier = [(keys[0], 0)] if keys else []
        while frontier:
            key, at = heappop(frontier)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(keys):
                    heappush(frontier, (keys[child], child))
            entry = self._entries.get(key.request_id)
            if entry is not None and entry.key == key and key.request_id not in seen:
                seen.add(key.request_id)
                yield entry.request

    def remove(self, request_id: str) -> WaitingRequest:
        """Remove a request from any position.

        Raises:
            KeyError: no such request waits.
        """
        request = self._take(request_id)
        self._sweep()
        return request

    def _take(self, request_id: str) -> WaitingRequest:
        request = self._entries.pop(request_id).request
        for shared in request.affinity:
            sharing = self._sharing[shared]
            del sharing[request_id]
            if not sharing:
                del self._sharing[shared]
        return request

    def key(self, request_id: str) -> Key:
        """Return the request's sort key as of the latest ``now`` seen.

        Raises:
            KeyError: no such request waits.
        """
        return self._entries[request_id].key

    @property
    def changes_at(self) -> float:
        """Return the time until which no key changes on its own."""
        return self._changes[0][0] if self._changes else math.inf

    def head(self, now: float) -> tuple[Key, WaitingRequest] | None:
        """Return the first request, without rule 2, and its sort key; None if the queue is empty."""
        self._advance(now)
        entry = self._first()
        return None if entry is None else (entry.key, entry.request)

    def peek(self, now: float) -> Placed | None:
        """Return the request to run first at ``now``; None if the queue is empty."""
        self._advance(now)
        entry = self._first()
        if entry is None:
            return None
        first = entry.placed
        if self._last is None or not self._last.affinity:
            return first
        return self._mate(first, self._last) or first

    def _mate(self, first: Placed, last: WaitingRequest) -> Placed | None:
        """Return a request that shares a key with ``last``, if ``first`` can wait for it (rule 2)."""
        shares = last.affinity.intersection(self._sharing)
        if not shares or first.reason in NEVER_OVERTAKEN:
            return None
        spare = first.request.latest_start - self._now
        if not 0 <= spare < math.inf:
            spare = math.inf if self._moved < MOST_MOVED else -math.inf
        for shared in sorted(shares):
            mate = self._entries[next(iter(self._sharing[shared]))].request
            if mate is first.request:
                return None
            if mate.sla != last.sla or mate.sla.rank != first.request.sla.rank:
                continue
            if spare >= self._moved_seconds + mate.cost_seconds:
                return Placed(mate, PlaceReason.AFFINITY)
        return None

    def _first(self) -> _Entry | None:
        while self._keys:
            key = self._keys[0]
            entry = self._entries.get(key.request_id)
            if entry is not None and entry.key == key:
                return entry
            heappop(self._keys)
        return None

    def pop(self, now: float) -> Placed | None:
        """Remove and return the request that `peek` returns."""
        first = self.peek(now)
        if first is not None:
            self.take(first)
        return first

    def take(self, placed: Placed) -> None:
        """Remove the request that the last `peek` returned.

        Raises:
            KeyError: that request no longer waits.
        """
        moved = placed.reason is PlaceReason.AFFINITY
        self._moved = self._moved + 1 if moved else 0
        self._moved_seconds = self._moved_seconds + placed.request.cost_seconds if moved else 0.0
        self._last = self._take(placed.request.request_id)
        self._sweep()

    def _advance(self, now: float) -> None:
        if now > self._now:
            self._now = now
        while self._changes and self._changes[0][0] <= self._now:
            at, request_id = heappop(self._changes)
            entry = self._entries.get(request_id)
            if entry is None or entry.changes_at != at:
                continue
            entry.look(self.order, self._now)
            self.revision += 1
            heappush(self._keys, entry.key)
            if entry.changes_at != math.inf:
                heappush(self._changes, (entry.changes_at, request_id))

    def _sweep(self) -> None:
        bound = 2 * len(self._entries) + 64
        if len(self._keys) > bound:
            self._keys = [entry.key for entry in self._entries.values()]
            heapify(self._keys)
        if len(self._changes) > bound:
            self._changes = [(e.changes_at, i) for i, e in self._entries.items() if e.changes_at != math.inf]
            heapify(self._changes)
