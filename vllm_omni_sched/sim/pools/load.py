"""How much work a replica has left, and how much at once it is given."""

from heapq import heappop, heappush

from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.progressive import ProgressiveWindow
from vllm_omni_sched.sim.pools.trip import Leg

_TAIL = 0.1  # of its estimate: what a request that took longer is taken to need yet


class _Running:
    __slots__ = ("cost", "end", "tail")

    def __init__(self, end: float, cost: float) -> None:
        self.end, self.cost, self.tail = end, cost, False


class Load:
    """The work that a replica has in hand, in O(log n) for each request.

    1. Requests that run together slow each other down; what one costs is its share of the time: the seconds that
       passed divided by how many ran (processor sharing).
    2. What is left of one is its estimate less its share so far, and no less than a tenth of the estimate.
    """

    __slots__ = (
        "_began",
        "_ends",
        "_number",
        "_open",
        "_served",
        "_since",
        "_sum",
        "_tails",
        "_turns",
        "limit",
        "window",
    )

    def __init__(self, limit: BatchControl | None = None, window: ProgressiveWindow | None = None) -> None:
        self.limit = limit
        self.window = window
        self._served = 0.0  # seconds that each request in it has had
        self._since = 0.0
        self._began: dict[Leg, tuple[float, _Running]] = {}
        self._turns: list[tuple[float, int, _Running]] = []  # by when only the tail is left
        self._ends: list[tuple[float, int, Leg]] = []
        self._sum = 0.0  # of the ends of those with more than their tail left
        self._open = 0  # how many these are
        self._tails = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._began)

    def _pass(self, now: float) -> None:
        if self._began:
            if now > self._since:
                self._served += (now - self._since) / len(self._began)
        else:  # small numbers are more exact
            self._served = self._sum = self._tails = 0.0
            self._open = 0
            self._turns.clear()
            self._ends.clear()
        self._since = now

    def begin(self, leg: Leg, now: float, units: int = 0) -> None:
        """A request is given to the replica."""
        self._pass(now)
        cost = leg.cost_seconds
        running = _Running(self._served + cost, cost)
        self._began[leg] = self._served, running
        self._number += 1
        heappush(self._turns, (running.end - _TAIL * cost, self._number, running))
        heappush(self._ends, (running.end, self._number, leg))
        self._sum += running.end
        self._open += 1
        if self.window is not None:
            self.window.begin(leg.name, units, now)

    def through(self, leg: Leg, now: float, seconds: float) -> None:
        """A request is through with what the latency target is about; it took so long."""
        if self.limit is not None:
            self.limit.observe(seconds, now, max(len(self._began), 1))
        if self.window is not None:
            self.window.through(leg.name, now)

    def end(self, leg: Leg, now: float) -> float | None:
        """The seconds that it had; None for one that is not there."""
        self._pass(now)
        if self.window is not None:
            self.window.drop(leg.name)
        found = self._began.pop(leg, None)
        if found is None:
            return None
        began, running = found
        if running.tail:
            self._tails -= _TAIL * running.cost
        else:
            self._sum -= running.end
            self._open -= 1
            running.tail = True  # as if it had turned: not to be counted again
            running.cost = 0.0
        return self._served - began

    def remaining_seconds(self, now: float) -> float:
        """Of all that are there."""
        self._pass(now)
        turns, served = self._turns, self._served
        while turns and turns[0][0] <= served:
            running = heappop(turns)[2]
            if not running.tail:
                running.tail = True
                self._sum -= running.end
                self._open -= 1
                self._tails += _TAIL * running.cost
        return max(self._sum - self._open * served + self._tails, 0.0)

    def next_end_seconds(self, now: float) -> float:
        """Until the first of them should be done; ``inf`` where all have taken longer than they should."""
        self._pass(now)
        ends, served, began = self._ends, self._served, self._began
        while ends and (ends[0][0] <= served or ends[0][2] not in began):
            heappop(ends)
        return (ends[0][0] - served) * len(began) if ends else float("inf")
