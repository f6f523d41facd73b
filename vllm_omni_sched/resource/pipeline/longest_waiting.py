"""Find the longest of the waiting requests that no deadline orders."""

import math
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from vllm_omni_sched.graph.order import Key, WaitingRequest

_SPARE = 64  # entries of requests that are gone, at least, before a heap is swept


class Peers(NamedTuple):
    """Common properties of requests that only their arrival orders: they have no deadline."""

    needs_memory: bool
    rank: int
    priority: int


def peers_of(request: WaitingRequest) -> Peers | None:
    """Return the peers of a request until it ages; None for one with a deadline."""
    if min(request.latest_start, request.due) < math.inf:
        return None
    return Peers(not request.holds_memory, request.sla.rank, request.priority)


def peers_by_key(key: Key) -> Peers | None:
    """Return the peers of a request by its present sort key; None for one that has a deadline, or that has aged."""
    return Peers(key.needs_memory, key.rank, key.priority) if key.due == math.inf else None


class Sized(NamedTuple):
    """A waiting request by its cost; the least one is the longest, of equal ones the one that came first."""

    minus_cost: float
    number: int
    request_id: str


class LongestWaiting:
    """Waiting requests by cost, separately for those that are peers; O(log n) for each change, amortised.

    Requests with a deadline are left out. Entries of removed requests are skipped when they come up, and swept once
    they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._live: dict[str, tuple[Peers, Sized]] = {}
        self._heaps: dict[Peers, list[Sized]] = {}

    def push(self, request: WaitingRequest, number: int) -> None:
        """Add a request with its number in order of arrival; it must not be here."""
        peers = peers_of(request)
        if peers is None:
            return
        one = Sized(-request.cost_seconds, number, request.request_id)
        self._live[request.request_id] = peers, one
        heap = self._heaps.setdefault(peers, [])
        heappush(heap, one)
        if len(heap) > 2 * len(self._live) + _SPARE:
            heap[:] = [each for of, each in self._live.values() if of == peers]
            heapify(heap)

    def remove(self, request_id: str) -> None:
        """Remove a request; unknown ones are ignored."""
        self._live.pop(request_id, None)

    def first(self, peers: Peers) -> Sized | None:
        """Return the longest of these; None if there is none."""
        heap = self._heaps.get(peers)
        while heap:
            one = heap[0]
            if self._live.get(one.request_id) == (peers, one):
                return one
            heappop(heap)
        self._heaps.pop(peers, None)
        return None
