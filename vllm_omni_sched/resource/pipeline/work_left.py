"""Track the remaining work of a replica, request by request."""

import math
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_TAIL = 0.1  # of its estimate: what a request that took longer is assumed to need still
_SPARE = 16  # entries of requests that are gone, at least, before the heaps are swept


class _Running:
    __slots__ = ("cost", "end", "number", "tail")

    def __init__(self, end: float, cost: float, number: int) -> None:
        self.end, self.cost, self.number, self.tail = end, cost, number, False


class WorkLeft(Generic[Key]):
    """The running requests of a replica and their remaining work.

    1. Requests that run together slow each other down; each is charged its share of the time: the seconds that
       passed divided by the number of running requests (processor sharing).
    2. The remaining work of a request is its estimate minus the work done on it, which is its share of the time times
       ``speed``, and at least a tenth of the estimate. A new speed applies from then on.
    3. A request costs O(log n) when it begins, and once more while it runs; the total costs O(1).
    4. Requests that have left are dropped from the heaps once they outnumber the running ones.
    """

    __slots__ = (
        "_began",
        "_done",
        "_ends",
        "_number",
        "_open",
        "_served",
        "_since",
        "_sum",
        "_tails",
        "_turns",
        "speed",
    )

    def __init__(self) -> None:
        self.speed = 1.0  # relative to the device that costs are estimated for
        self._served = 0.0  # seconds that each running request has had
        self._done = 0.0  # work done on each running request, in seconds at speed 1
        self._since = 0.0
        self._began: dict[Key, tuple[float, _Running]] = {}
        self._turns: list[tuple[float, int, _Running]] = []  # done work at which only the tail is left
        self._ends: list[tuple[float, int, Key]] = []
        self._sum = 0.0  # of the ends of requests with more than their tail left
        self._open = 0  # number of these requests
        self._tails = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._began)

    def __contains__(self, key: object) -> bool:
        return key in self._began

    @property
    def since(self) -> float:
        """Return the latest time that was passed in."""
        return self._since

    def _pass(self, now: float) -> None:
        if self._began:
            if now > self._since:
                share = (now - self._since) / len(self._began)
                self._served += share
                self._done += share * self.speed
        else:  # restart from 0: small numbers are more exact
            self._served = self._done = self._sum = self._tails = 0.0
            self._open = 0
            self._turns.clear()
            self._ends.clear()
        self._since = now

    def add(self, key: Key, cost_seconds: float, now: float) -> None:
        """Add a request that begins to run; one that runs already begins anew."""
        if key in self._began:
            self.take(key, now)
        self._pass(now)
        self._number += 1
        running = _Running(self._done + cost_seconds, cost_seconds, self._number)
        self._began[key] = self._served, running
        heappush(self._turns, (running.end - _TAIL * cost_seconds, self._number, running))
        heappush(self._ends, (running.end, self._number, key))
        if len(self._ends) > 2 * len(self._began) + _SPARE:
            self._sweep()
        self._sum += running.end
        self._open += 1

    def _sweep(self) -> None:
        """Drop what is left of requests that are gone."""
        began = self._began
        self._ends = [(one.end, one.number, key) for key, (_, one) in began.items()]
        self._turns = [(one.end - _TAIL * one.cost, one.number, one) for _, one in began.values() if not one.tail]
        heapify(self._ends)
        heapify(self._turns)

    def take(self, key: Key, now: float) -> float | None:
        """Remove a request, and return the seconds that it had; None for an unknown one."""
        self._pass(now)
        found = self._began.pop(key, None)
        if found is None:
            return None
        began, running = found
        if running.tail:
            self._tails -= _TAIL * running.cost
        else:
            self._sum -= running.end
            self._open -= 1
            running.tail = True  # as if only the tail were left: not to be counted again
            running.cost = 0.0
        return self._served - began

    def remaining_seconds(self, now: float) -> float:
        """Return the remaining seconds of all running requests, at speed 1."""
        self._pass(now)
        turns, done = self._turns, self._done
        while turns and turns[0][0] <= done:
            running = heappop(turns)[2]
            if not running.tail:
                running.tail = True
                self._sum -= running.end
                self._open -= 1
                self._tails += _TAIL * running.cost
        left = self._sum - self._open * done + self._tails
        return left if left > 0.0 else 0.0

    def next_end_seconds(self, now: float) -> float:
        """Return the seconds until the next request should finish; ``inf`` if all have exceeded their estimates."""
        self._pass(now)
        ends, done, began = self._ends, self._done, self._began
        while ends and (ends[0][0] <= done or self._is_gone(ends[0])):
            heappop(ends)
        return (ends[0][0] - done) * len(began) / self.speed if ends else math.inf

    def _is_gone(self, end: tuple[float, int, Key]) -> bool:
        running = self._began.get(end[2])
        return running is None or running[1].end != end[0]  # it began anew
