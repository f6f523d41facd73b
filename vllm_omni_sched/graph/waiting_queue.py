"""The waiting order, kept up to date request by request."""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from vllm_omni_sched.graph.order import Key, Placed, WaitingOrder, WaitingRequest


@dataclass
class _Entry:
    request: WaitingRequest
    key: Key
    changes_at: float


class WaitingQueue:
    """Waiting requests in the order of `WaitingOrder`, affinity aside; O(log n) per operation, amortised.

    1. `peek` and `pop` answer what ``order.plan(all waiting, now)[0]`` would, were there no affinity keys.
    2. A key changes at most twice, when the request turns late and when it ages. A second heap
       holds these moments; a changed key is pushed anew and its former one skipped when it comes up.
    3. Skipped keys are swept out once they outnumber the live ones.
    4. ``now`` never goes back: an earlier one counts as the latest one seen.
    """

    def __init__(self, order: WaitingOrder) -> None:
        self.order = order
        self._now = float("-inf")
        self._entries: dict[str, _Entry] = {}
        self._keys: list[Key] = []
        self._changes: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def push(self, request: WaitingRequest, now: float) -> None:
        """Add a request.

        Raises:
            ValueError: a request of this id waits already.
        """
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id!r} waits already; remove it before it is pushed again")
        self._now = max(self._now, now)
        entry = _Entry(request, self.order.key(request, self._now), self.order.next_change(request, self._now))
        self._entries[request.request_id] = entry
        heappush(self._keys, entry.key)
        if entry.changes_at != float("inf"):
            heappush(self._changes, (entry.changes_at, request.request_id))

    def remove(self, request_id: str) -> WaitingRequest:
        """Take a request out, wherever it stands.

        Raises:
            KeyError: no such request waits.
        """
        request = self._entries.pop(request_id).request
        self._sweep()
        return request

    def peek(self, now: float) -> Placed | None:
        """The request to run first at ``now``; None when none waits."""
        self._advance(now)
        while self._keys:
            key = self._keys[0]
            entry = self._entries.get(key.request_id)
            if entry is not None and entry.key == key:
                return Placed(entry.request, self.order.reason(key, entry.request))
            heappop(self._keys)
        return None

    def pop(self, now: float) -> Placed | None:
        """`peek`, and take it out."""
        first = self.peek(now)
        if first is not None:
            heappop(self._keys)
            del self._entries[first.request.request_id]
            self._sweep()
        return first

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)
        while self._changes and self._changes[0][0] <= self._now:
            at, request_id = heappop(self._changes)
            entry = self._entries.get(request_id)
            if entry is None or entry.changes_at != at:
                continue
            entry.key = self.order.key(entry.request, self._now)
            entry.changes_at = self.order.next_change(entry.request, self._now)
            heappush(self._keys, entry.key)
            if entry.changes_at != float("inf"):
                heappush(self._changes, (entry.changes_at, request_id))

    def _sweep(self) -> None:
        bound = 2 * len(self._entries) + 64
        if len(self._keys) > bound:
            self._keys = [entry.key for entry in self._entries.values()]
            heapify(self._keys)
        if len(self._changes) > bound:
            inf = float("inf")
            self._changes = [(e.changes_at, i) for i, e in self._entries.items() if e.changes_at != inf]
            heapify(self._changes)
