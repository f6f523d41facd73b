"""The order in which waiting requests deserve to run.

Least slack first is EDF with the cost taken off the deadline (Liu and Layland, "Scheduling
Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973). EDF alone collapses
under overload, when requests that are lost already displace those that are not; hence rule 4.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.graph.affinity import pull_together


class PlaceReason(str, Enum):
    """Why a request stands where it stands."""

    HOLDS_MEMORY = "holds_memory"  # what it has computed stays in KV memory until it has run
    AGED = "aged"  # waited `max_wait_seconds`
    REALTIME = "realtime"  # of the class of rank 0, on time
    PRIORITY = "priority"  # the user set one
    DEADLINE = "deadline"  # by its slack
    ARRIVAL = "arrival"  # its class has no TTFT target
    LATE = "late"  # can no longer meet its deadline
    AFFINITY = "affinity"  # moved up, next to a request it shares something with


class Undated(str, Enum):
    """In which order requests of a class go that has no deadline; `SHORTEST` and `LONGEST` are by estimated cost."""

    ARRIVAL = "arrival"
    SHORTEST = "shortest"  # the shortest mean wait (SPT: Smith, "Various Optimizers for Single-Stage Production", 1956)
    LONGEST = "longest"  # all done soonest on several replicas (LPT: Graham, "Bounds on Multiprocessing ...", 1969)


NEVER_OVERTAKEN = frozenset({PlaceReason.HOLDS_MEMORY, PlaceReason.AGED})
"""Ahead of these affinity moves nobody."""


@dataclass(frozen=True)
class SlaClass:
    """What a kind of request was promised; ``math.inf`` for no promise. Rank 0 goes first.

    Raises:
        ConfigError: a target is not positive, or the rank is negative.
    """

    name: str
    ttft_seconds: float
    itl_seconds: float
    rank: int

    def __post_init__(self) -> None:
        for field in ("ttft_seconds", "itl_seconds"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"SLA class {self.name!r}: {field} must be above 0, got {getattr(self, field)}")
        if self.rank < 0:
            raise ConfigError(f"SLA class {self.name!r}: rank must be 0 or more, got {self.rank}")


REALTIME = SlaClass("realtime", ttft_seconds=0.3, itl_seconds=0.05, rank=0)
INTERACTIVE = SlaClass("interactive", ttft_seconds=2.0, itl_seconds=0.1, rank=1)
BATCH = SlaClass("batch", ttft_seconds=math.inf, itl_seconds=math.inf, rank=2)
DEFAULT_CLASSES = (REALTIME, INTERACTIVE, BATCH)
"""Audio sessions, then people who wait for an answer, then work that nobody waits for."""


@dataclass(frozen=True)
class WaitingRequest:
    """One waiting request as the order sees it.

    ``arrival``: when it arrived, in seconds of the clock that ``now`` comes from.
    ``cost_seconds``: estimated prefill and encode time.
    ``affinity``: the ``mm_hash`` and prefix ids that other requests may have too.
    ``priority``: as in vLLM, lower is earlier.
    ``holds_memory``: it has KV blocks already, as a session between two inputs has.
    ``deadline``: when it must be done here, on the same clock; None: arrival + the TTFT target of its class.
    ``due``: when it should have started here, if that is earlier than the last moment: a request
    with more stages before it leaves them a part of its slack. It sorts by this, and is late by ``deadline``.

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
        """The last moment to start and still meet the deadline; the slack is this minus ``now``."""
        deadline = self.arrival + self.sla.ttft_seconds if self.deadline is None else self.deadline
        return deadline - self.cost_seconds


@dataclass(frozen=True)
class Placed:
    """A request in its place, and why."""

    request: WaitingRequest
    reason: PlaceReason


class Key(NamedTuple):
    """Sorts waiting requests; smaller is earlier. It changes only when a request turns late or aged."""

    needs_memory: bool
    rank: int
    late: bool
    priority: int
    due: float
    cost: float
    arrival: float
    request_id: str


_AGED_RANK = -1  # before all classes


class WaitingOrder:
    """The order of waiting requests.

    1. One that holds KV memory goes before all that need some: were it behind a request that finds none,
       both would wait for ever.
    2. A request that has waited ``max_wait_seconds`` goes first; of several, the one that arrived first.
       Otherwise classes go by rank: realtime, interactive, batch.
    3. In a class, by user priority, then least slack first: deadline (arrival + TTFT target) - now - cost; or by
       when it is due, if that is earlier. In a class without a target as ``undated`` says, which rule 2 bounds.
    4. A request that cannot meet its deadline any more goes behind those of its class that can.
    5. Requests of one class that share an affinity key stand together, if by the estimated costs
       no request in between misses a deadline for it that it would have met, or starts after it is due. None moves
       ahead of an aged one, or of one that holds memory.

    Ties go by arrival, then by request id. So a request that has aged is overtaken by nobody who
    arrived later, those who hold memory aside: of the others as many are admitted before it as there were
    earlier arrivals waiting when it aged.

    Raises:
        ConfigError: ``max_wait_seconds`` is not above 0.
    """

    _COUNTS: ClassVar = {Undated.ARRIVAL: 0.0, Undated.SHORTEST: 1.0, Undated.LONGEST: -1.0}

    def __init__(self, max_wait_seconds: float = 30.0, undated: Undated = Undated.ARRIVAL) -> None:
        if not max_wait_seconds > 0:
            raise ConfigError(f"max_wait_seconds must be above 0, got {max_wait_seconds}")
        self.max_wait_seconds = max_wait_seconds
        self.undated = undated

    def plan(self, waiting: Iterable[WaitingRequest], now: float) -> tuple[Placed, ...]:
        """All of ``waiting``, first to run first. O(n log n)."""
        keyed = sorted((self.key(request, now), request) for request in waiting)
        placed = [Placed(request, self.reason(key, request)) for key, request in keyed]
        if any(request.affinity for _, request in keyed):
            return self._with_affinity(placed, now)
        return tuple(placed)

    def _with_affinity(self, placed: list[Placed], now: float) -> tuple[Placed, ...]:
        spare, start = [], now
        for one in placed:
            if one.reason in NEVER_OVERTAKEN:
                left = -math.inf  # rule 5: nobody moves ahead of it
            else:
                left = one.request.latest_start - start
                # late, it has no deadline to lose; past when it is due, it waits for nobody
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
        """What to sort by at ``now``, affinity aside."""
        arrival, request_id, needs = request.arrival, request.request_id, not request.holds_memory
        if now >= self.aged_at(request):
            return Key(needs, _AGED_RANK, False, 0, arrival, 0.0, arrival, request_id)
        late = now > request.latest_start
        due = arrival if late else min(request.latest_start, request.due)
        cost = self._COUNTS[self.undated] * request.cost_seconds if due == math.inf else 0.0
        return Key(needs, request.sla.rank, late, request.priority, due, cost, arrival, request_id)

    def aged_at(self, request: WaitingRequest) -> float:
        """When the request has waited long enough to go first."""
        return request.arrival + self.max_wait_seconds

    def next_change(self, request: WaitingRequest, now: float) -> float:
        """When the key of the request changes next, after ``now``; ``inf`` for never."""
        turns_late = math.nextafter(request.latest_start, math.inf)
        aged = self.aged_at(request)
        return min((at for at in (turns_late, aged) if at > now), default=math.inf) if now < aged else math.inf

    @staticmethod
    def reason(key: Key, request: WaitingRequest) -> PlaceReason:
        """The rule that gave the request this key."""
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
