"""Order waiting requests.

Least slack first is EDF with the cost subtracted from the deadline (Liu and Layland, "Scheduling
Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973). EDF alone collapses
under overload, when requests that will miss their deadline anyway displace others; hence rule 4.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from vllm_omni_sched.graph.affinity import pull_together


class PlaceReason(str, Enum):
    """Reason for a request's position."""

    HOLDS_MEMORY = "holds_memory"  # its computed tokens stay in KV memory until it has run
    AGED = "aged"  # waited for `max_wait_seconds`
    REALTIME = "realtime"  # in the class of rank 0, and on time
    PRIORITY = "priority"  # the user set one
    DEADLINE = "deadline"  # ordered by its slack
    ARRIVAL = "arrival"  # its class has no TTFT target
    LATE = "late"  # can no longer meet its deadline
    AFFINITY = "affinity"  # moved up, next to a request with a common affinity key


class Undated(str, Enum):
    """Order within a class that has no deadline; all but `ARRIVAL` use the estimated cost."""

    ARRIVAL = "arrival"
    BALANCED = "balanced"  # as `ARRIVAL`; where replicas are known, the longest goes before it would end last
    SHORTEST = "shortest"  # least mean wait (SPT: Smith, "Various Optimizers for Single-Stage Production", 1956)
    LONGEST = "longest"  # least makespan on several replicas (LPT: Graham, "Bounds on Multiprocessing ...", 1969)


NEVER_OVERTAKEN = frozenset({PlaceReason.HOLDS_MEMORY, PlaceReason.AGED})
"""Affinity never moves a request ahead of one that is placed for these reasons."""


@dataclass(frozen=True)
class SlaClass:
    """Latency targets of a class of requests; ``math.inf`` for no target. Rank 0 goes first."""

    name: str
    ttft_seconds: float
    itl_seconds: float
    rank: int


REALTIME = SlaClass("realtime", ttft_seconds=0.3, itl_seconds=0.05, rank=0)
INTERACTIVE = SlaClass("interactive", ttft_seconds=2.0, itl_seconds=0.1, rank=1)
BATCH = SlaClass("batch", ttft_seconds=math.inf, itl_seconds=math.inf, rank=2)
DEFAULT_CLASSES = (REALTIME, INTERACTIVE, BATCH)
"""Audio sessions, then interactive requests, then background work."""


@dataclass(frozen=True)
class WaitingRequest:
    """Snapshot of one waiting request.

    ``arrival``: arrival time, in seconds of the clock that ``now`` comes from.
    ``cost_seconds``: estimated prefill and encode time.
    ``affinity``: the ``mm_hash`` and prefix ids that other requests may share.
    ``priority``: as in vLLM, lower is earlier.
    ``holds_memory``: it has KV blocks already, like a session between two inputs.
    ``deadline``: when it must be finished in this stage, on the same clock; None: arrival + its class's TTFT target.
    ``due``: when it should have started in this stage, if earlier than ``latest_start``: a request with more
    stages ahead leaves them a part of its slack. It is sorted by ``due``, and late by ``deadline``.

    Raises:
        ValueError: arrival or cost is not a finite number, the cost is negative, or a time is not a number.
    """

    request_id: str
    arrival: float
    sla: SlaClass
    cost_seconds: float = 0.0
    modality: str = "text"
    affinity: frozenset[str] = frozenset()
    priority: int = 0
    holds_memory: bool = False
    deadline: float | None = None
    due: float = math.inf

    def __post_init__(self) -> None:
        if not math.isfinite(self.arrival):
            raise ValueError(f"request {self.request_id!r}: arrival must be finite, got {self.arrival}")
        if not 0 <= self.cost_seconds < math.inf:
            raise ValueError(f"request {self.request_id!r}: cost_seconds must be finite and >= 0")
        if math.isnan(self.due) or (self.deadline is not None and math.isnan(self.deadline)):
            raise ValueError(f"request {self.request_id!r}: deadline and due must be numbers")

    @property
    def latest_start(self) -> float:
        """Return the last moment to start and still meet the deadline; the slack is this minus ``now``."""
        deadline = self.arrival + self.sla.ttft_seconds if self.deadline is None else self.deadline
        return deadline - self.cost_seconds


class Placed(NamedTuple):
    """A request in its position, and the reason for it."""

    request: WaitingRequest
    reason: PlaceReason


class Key(NamedTuple):
    """Sort key of a waiting request; smaller is earlier. It changes only when the request turns late or ages."""

    needs_memory: bool
    rank: int
    late: bool
    priority: int
    due: float
    cost: float
    arrival: float
    request_id: str


_AGED_RANK = -1  # ahead of all classes


class WaitingOrder:
    """Sorts waiting requests.

    1. A request that holds KV memory goes ahead of all that still need some: behind a request that finds none,
       both would wait forever.
    2. A request that has waited ``max_wait_seconds`` goes first; of several, the one that arrived first.
       Otherwise classes go by rank: realtime, interactive, batch.
    3. Within a class, by user priority, then least slack first: deadline (arrival + TTFT target) - now - cost; or by
       ``due``, if that is earlier. A class without a target is ordered by ``undated``, bounded by rule 2. What
       `Undated.BALANCED` adds to the order of arrival depends on the replicas, so the gate of a stage does it.
    4. A request that can no longer meet its deadline goes behind the requests of its class that can.
    5. Requests of one class that share an affinity key stand together, if by the estimated costs no
       request in between misses its deadline because of it, or starts after it is due. No request moves
       ahead of an aged one, or of one that holds memory.

    Ties are broken by arrival, then by request id. So no request that arrived later overtakes an aged
    one, except requests that hold memory: besides those, only earlier arrivals that were
    waiting when it aged are admitted before it.
    """

    _COUNTS: ClassVar = {Undated.ARRIVAL: 0.0, Undated.BALANCED: 0.0, Undated.SHORTEST: 1.0, Undated.LONGEST: -1.0}

    def __init__(self, max_wait_seconds: float = 30.0, undated: Undated = Undated.ARRIVAL) -> None:
        self.max_wait_seconds = max_wait_seconds
        self.undated = undated

    def plan(self, waiting: Iterable[WaitingRequest], now: float) -> tuple[Placed, ...]:
        """Return all of ``waiting``, first to run first. O(n log n)."""
        keyed = sorted((self.key(request, now), request) for request in waiting)
        placed = [Placed(request, self.reason(key, request)) for key, request in keyed]
        if any(request.affinity for _, request in keyed):
            return self._with_affinity(placed, now)
        return tuple(placed)

    def _with_affinity(self, placed: list[Placed], now: float) -> tuple[Placed, ...]:
        spare, start = [], now
        for one in placed:
            if one.reason in NEVER_OVERTAKEN:
                left = -math.inf  # rule 5: no request moves ahead of it
            else:
                left = one.request.latest_start - start
                # a late request has no deadline to lose; one past its due time waits for no other
                left = max(min(left, one.request.due - start), 0.0) if left >= 0 else math.inf
            spare.append(left)
            start += one.request.cost_seconds
        moves = pull_together(
            [one.request.affinity for one in placed],
            [one.request.cost_seconds for one in placed],
            spare,
            [one.request.sla.rank for one in placed],
        )
        return tuple(
            Placed(placed[move.position].request, PlaceReason.AFFINITY) if move.pulled else placed[move.position]
            for move in moves
        )

    def key(self, request: WaitingRequest, now: float) -> Key:
        """Return the sort key at ``now``, without affinity."""
        arrival, request_id, needs = request.arrival, request.request_id, not request.holds_memory
        if now >= self.aged_at(request):
            return Key(needs, _AGED_RANK, False, 0, arrival, 0.0, arrival, request_id)
        latest = request.latest_start
        late = now > latest
        due = arrival if late else min(latest, request.due)
        cost = self._COUNTS[self.undated] * request.cost_seconds if due == math.inf else 0.0
        return Key(needs, request.sla.rank, late, request.priority, due, cost, arrival, request_id)

    def aged_at(self, request: WaitingRequest) -> float:
        """Return the time at which the request has waited long enough to go first."""
        return request.arrival + self.max_wait_seconds

    def next_change(self, request: WaitingRequest, now: float) -> float:
        """Return the time at which the request's key changes next after ``now``; ``inf`` for never."""
        aged = self.aged_at(request)
        if now >= aged:
            return math.inf
        turns_late = math.nextafter(request.latest_start, math.inf)
        return turns_late if now < turns_late < aged else aged

    @staticmethod
    def reason(key: Key, request: WaitingRequest) -> PlaceReason:
        """Return the reason that corresponds to this key of the request."""
        if not key.needs_memory:
            return PlaceReason.HOLDS_MEMORY
        if key.rank == _AGED_RANK:
            return PlaceReason.AGED
        if key.late:
            return PlaceReason.LATE
        if request.priority:
            return PlaceReason.PRIORITY
        if key.rank == REALTIME.rank:
            return PlaceReason.REALTIME
        return PlaceReason.ARRIVAL if key.due == math.inf else PlaceReason.DEADLINE
