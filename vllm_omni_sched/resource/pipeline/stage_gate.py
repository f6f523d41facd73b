"""Decide which waiting requests a stage gets now, and on which replica."""

import math
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush, nlargest
from typing import NamedTuple

from vllm_omni_sched.graph.order import Key, Placed, Undated, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.resource.pipeline.balance import (
    CHOICES,
    LOOK_AT_ALL,
    Balancer,
    CostBalancer,
    RandomSource,
)
from vllm_omni_sched.resource.pipeline.longest_waiting import LongestWaiting, Peers, Sized, peers_by_key
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState

MOST_AHEAD = 4
"""Most later arrivals that pass a request because they are long (rule 7 of `StageGate`). More gained nothing."""

_ROUNDING = 1 - 1e-9  # rounding errors of sums decide nothing


class ReleaseReason(str, Enum):
    """Reason why a request is released now."""

    IDLE = "idle"  # a replica has nothing to do
    BATCH_FULL = "batch_full"  # it fills its replica, with those released along with it
    WINDOW_OVER = "window_over"  # the batching window of one is over, and the batch goes as it is
    LOW_SHARE = "low_share"  # the share of the low class
    OVERDUE = "overdue"  # passed over as often as allowed
    LONGEST = "longest"  # it would end last if it waited longer


@dataclass(frozen=True)
class GateRequest:
    """A request that waits before the stage.

    ``waiting``: what its place in the order goes by, and its cost.
    ``low``: of the class that has only its share while others wait.
    ``units``: of long work; 0 for short work, which no limit of units holds back.
    ``needs``: which credits it takes to start; those with equal needs have them at the same moments. Of few values.

    Raises:
        ValueError: the units are negative.
    """

    waiting: WaitingRequest
    low: bool = False
    units: int = 0
    needs: Hashable = None

    def __post_init__(self) -> None:
        if self.units < 0:
            raise ValueError(f"request {self.request_id!r}: units must be 0 or more, got {self.units}")

    @property
    def request_id(self) -> str:
        """Return the id of ``waiting``."""
        return self.waiting.request_id


class GateTerms:
    """Questions of the gate to its caller. The defaults always grant credits and report no cache or distance."""

    def has_credits(self, needs: Hashable) -> bool:
        """Return whether requests with these needs may start, as far as later stages allow."""
        return True

    def take(self, request_id: str) -> bool:
        """Take the credits of a request to be released; if False, requests with equal needs are skipped this round."""
        return True

    def warm(self, request_id: str) -> Mapping[int, float]:
        """Return the fraction of the request in each replica's cache, by replica id, where not 0."""
        return {}

    def saved_seconds(self, request_id: str) -> Mapping[int, float] | None:
        """Return the seconds that each replica's cache saves, by replica id, where not 0; None: not known."""
        return None

    def distances(self, request_id: str) -> Mapping[int, float]:
        """Return the seconds that its input takes to each replica, by replica id, where not 0."""
        return {}

    def replica(self, replica_id: int) -> ReplicaState | None:
        """Describe a replica that was not drawn for this decision; None if it should get no request."""
        return None


@dataclass(frozen=True)
class Release:
    """Release of a request to a replica, with the reason."""

    request_id: str
    replica_id: int
    reason: ReleaseReason


@dataclass(frozen=True)
class GatePlan:
    """The releases in order, and the time to ask again if nothing happens."""

    releases: tuple[Release, ...] = ()
    wake_at: float | None = None


NO_ROOM = -1.0  # below 0 units: not even short work fits


class GateRoom:
    """The healthy replicas, including the work that this decision places on them.

    ``units``: the longest request that can be placed; ``idle_units``: the longest on an idle replica. `NO_ROOM` if not
    even a short one fits. Replicas that were idle at first stay so: requests released together start together.
    """

    def __init__(self, replicas: Sequence[ReplicaState] = ()) -> None:
        self._open = {one.replica_id: one for one in replicas if one.healthy and one.in_flight < one.limit}
        self._idle = {name for name, one in self._open.items() if one.in_flight == 0}
        self._measured: tuple[float, float] | None = None

    @property
    def units(self) -> float:
        return self._measure()[0]

    @property
    def idle_units(self) -> float:
        return self._measure()[1]

    def has_room(self) -> bool:
        return bool(self._open)

    def least_room(self, units: int) -> int:
        """Return the fewest free places in the batch of a replica that takes so many units; there must be one."""
        return min(one.room for one in self._open.values() if one.takes(units))

    def _measure(self) -> tuple[float, float]:
        if self._measured is None:
            spare = {name: _spare(one) for name, one in self._open.items()}
            idle = [units for name, units in spare.items() if name in self._idle]
            self._measured = max(spare.values(), default=NO_ROOM), max(idle, default=NO_ROOM)
        return self._measured

    def place(
        self,
        cost_seconds: float,
        units: int,
        near: tuple[Mapping[int, float], Mapping[int, float]],
        balancer: Balancer,
        rng: RandomSource,
        to_fill: bool = False,
        other: Callable[[int], ReplicaState | None] = lambda _: None,
        saved_seconds: Mapping[int, float] | None = None,
    ) -> int:
        """Place a request on a replica with room, or with ``to_fill`` on one with the least; there must be one.

        Args:
            near: warm fractions and distances, by replica.
            other: describes a replica that is missing here; the warmest of these are compared, too.
            saved_seconds: see `Balancer.pick`.
        """
        warm, distances = near
        if warm and not to_fill:
            self._fetch(warm, units, other)
        most = self.least_room(units) if to_fill else math.inf
        choices = [one for one in self._open.values() if one.room <= most and one.takes(units)]
        if warm or distances:
            choices = [_near(one, warm, distances) for one in choices]
        best = _warmest(choices) if warm and len(choices) > LOOK_AT_ALL else ()
        chosen = balancer.pick(cost_seconds, choices, rng, best, saved_seconds).replica_id
        assert chosen is not None  # all of them are healthy
        one = self._open[chosen].with_work(cost_seconds, units)
        if one.room:
            self._open[chosen] = one
        else:
            del self._open[chosen]
        self._measured = None
        return chosen

    def _fetch(self, warm: Mapping[int, float], units: int, other: Callable[[int], ReplicaState | None]) -> None:
        """Add the warmest missing replicas that take so many units."""
        away = [name for name, part in warm.items() if part and name not in self._open]
        for name in nlargest(CHOICES, away, key=warm.__getitem__):
            one = other(name)
            if one is not None and one.healthy and one.takes(units):
                self._open[name] = one


def _warmest(replicas: Sequence[ReplicaState]) -> list[int]:
    """Return the indices of the replicas with the largest warm fractions."""
    return nlargest(CHOICES, (at for at, one in enumerate(replicas) if one.warm), key=lambda at: replicas[at].warm)


def _near(replica: ReplicaState, warm: Mapping[int, float], distances: Mapping[int, float]) -> ReplicaState:
    """Return the replica as this request sees it. ``dataclasses.replace`` would be slower."""
    name = replica.replica_id
    if name not in warm and name not in distances:
        return replica
    return ReplicaState(
        name,
        replica.remaining_seconds,
        replica.in_flight,
        replica.limit,
        replica.speed,
        distances.get(name, replica.distance_seconds),
        warm.get(name, replica.warm),
        replica.healthy,
        replica.units,
        replica.units_limit,
    )


def _spare(replica: ReplicaState) -> float:
    """Return the units of the largest request that the replica takes; it must have room in its batch."""
    if not replica.units or replica.units_limit is None:
        return math.inf
    return max(replica.units_limit - replica.units, 0)


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
        self._by_cost = LongestWaiting() if order.undated is Undated.BALANCED else None
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
        if self._by_cost is not None:
            self._by_cost.push(entry.request.waiting, entry.number)
        self._entries[name] = entry
        self._first = None
        heappush(self._ages, (entry.number, name))
        if len(self._ages) > 2 * len(self._entries) + 64:
            self._ages = [(one.number, each) for each, one in self._entries.items()]
            heapify(self._ages)

    def remove(self, request_id: str) -> None:
        self._queue.remove(request_id)
        self._drop(request_id)
        self._first = None

    def take(self, request_id: str) -> None:
        """Remove a released request; if it was the next in order, a request that shares a key with it may follow."""
        if self._next is not None and self._next.request.request_id == request_id:
            self._queue.take(self._next)
        else:
            self._queue.remove(request_id)
        self._next = self._first = None
        self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._entries[request_id]
        if self._by_cost is not None:
            self._by_cost.remove(request_id)

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

    def longest(self, peers: Peers, now: float, units: float) -> Sized | None:
        """Return the longest of these requests that fits in so many units, None if none does; none may have aged."""
        if self._least > units or self._by_cost is None:
            return None
        if self._most <= units:
            return self._by_cost.first(peers)
        fitting = [self._entries[one.request_id] for one in self._fitting(now, units)]
        sized = [
            Sized(-one.request.waiting.cost_seconds, one.number, one.request.request_id)
            for one in fitting
            if peers_by_key(self._queue.key(one.request.request_id)) == peers
        ]
        return min(sized, default=None)

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


class StageGate:
    """Releases requests into a stage while its replicas have room, in the order of ``order``.

    1. A replica is given no more than its limit. Of those with room, the balancer picks by cost.
    2. Requests go in order, except by rules 3, 4 and 7. A request without credits lets those behind it go ahead.
    3. While others wait too, the low class gets ``min_share`` of the releases.
    4. Later arrivals pass a request at most ``max_passed`` times: then it is first, and while it
       has no credits no request is released. Of several such requests, the earliest arrival is first.
    5. Where every replica with room is busy, a request is held up to ``max_hold_seconds`` from its arrival, until
       there are enough to fill the batch; never while a replica with room is idle, as that would only cost time.
       Releases by rules 3, 4 and 7 are not held.
    6. A long request (``units``) goes where no other long one runs, or where they stay within the limit of units. While
       there is no such replica, others go ahead of it; once rule 4 applies to it, only short ones do, so the long ones
       that run end, and then it goes.
    7. With `Undated.BALANCED`, if the first request has no deadline and has not aged, the longest one of its class and
       priority goes ahead of it when it would end last if it waited longer: when all healthy replicas together need
       no longer for everything else that waits or runs. So the makespan is about that of longest first, while nearly
       all requests go as they came. At most `MOST_AHEAD` later arrivals pass a request for this reason. So where costs
       are known and only this rule changes the order, a request waits at most for the work that was there when it
       came and for these, divided over the replicas. The rule needs the states of all replicas, and at least two
       healthy ones.

    The gate is told of each arrival, change and departure, so a decision looks only at the first request of each lane
    and at the replicas: O(log n) for each release, and no waiting request is examined where there is no room.

    Args:
        balancer: default: ``CostBalancer()``.
        max_hold_seconds: 0 for no batching window.
        min_share: in [0, 1); 0 leaves the low class to rule 4 alone.
        order: default: ``WaitingOrder()``.
    """

    def __init__(
        self,
        balancer: Balancer | None = None,
        max_hold_seconds: float = 0.05,
        min_share: float = 0.1,
        max_passed: int = 64,
        order: WaitingOrder | None = None,
    ) -> None:
        self.balancer = balancer or CostBalancer()
        self.max_hold_seconds = max_hold_seconds
        self.min_share = min_share
        self.max_passed = max_passed
        self.order = order or WaitingOrder()
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # waiting requests, earliest arrival first
        self._lanes: dict[Traits, Lane] = {}
        self._number = 0
        self._low = 0  # waiting requests of the low class
        self._released: list[int] = []  # sorted numbers of released requests that came after the oldest waiting one
        self._ahead: list[int] = []  # those of them that were released by rule 7
        self._waiting_seconds = 0.0  # cost of all that wait
        self._owed = 0.0  # releases due to the low class
        self._now = -math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def put(self, request: GateRequest, now: float) -> None:
        """Add a request, or replace the data of a waiting one, which keeps its arrival."""
        name = request.request_id
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = Entry(request, self._number, now)
            self._number += 1
        else:
            self._out_of_lane(entry.request)
            self._low -= entry.request.low
            self._waiting_seconds -= entry.request.waiting.cost_seconds
            entry.request = request
        traits = traits_of(request)
        if traits not in self._lanes:
            self._lanes[traits] = Lane(traits, self.order)
        self._now = max(self._now, now)
        self._lanes[traits].push(entry, self._now)
        self._low += request.low
        self._waiting_seconds += request.waiting.cost_seconds

    def remove(self, request_id: str) -> None:
        """Remove a request that was not released; unknown requests are ignored."""
        if request_id in self._entries:
            self._out_of_lane(self._entries[request_id].request)
            self._forget(request_id)

    def release(
        self,
        now: float,
        replicas: Sequence[ReplicaState],
        rng: RandomSource,
        terms: GateTerms | None = None,
        most: float = math.inf,
    ) -> GatePlan:
        """Release requests, which no longer wait; ``warm`` and the distance in a replica's state apply to all requests.

        Args:
            now: current time; an earlier one than the latest counts as the latest.
            replicas: the replicas that may get a request. Full ones get none, and count for rule 7.
            terms: answers the gate's questions about requests.
            most: most releases. For a stage with many replicas, of which some are drawn, it is one, so
                that others are drawn for each release. Then rule 7 does not apply.
        """
        self._now = max(self._now, now)
        decision = _Decision(GateRoom(replicas), terms or GateTerms())
        if self.order.undated is Undated.BALANCED and most == math.inf and decision.room.has_room():
            decision.ends_last = ends_last_seconds(self._waiting_seconds, replicas)
        releases: list[Release] = []
        while self._entries and decision.room.has_room() and len(releases) < most:
            chosen = self._next(decision)
            if chosen is None:
                break
            name, reason = chosen
            request = self._entries[name].request
            if not decision.terms.take(name):
                decision.closed.add(request.needs)
                continue
            warm = decision.terms.warm(name)
            replica_id = decision.room.place(
                request.waiting.cost_seconds,
                request.units,
                (warm, decision.terms.distances(name)),
                self.balancer,
                rng,
                to_fill=reason is ReleaseReason.BATCH_FULL,
                other=decision.terms.replica,
                saved_seconds=decision.terms.saved_seconds(name) if warm else None,
            )
            releases.append(Release(name, replica_id, reason))
            self._count(request, reason)
        return GatePlan(tuple(releases), self._wake_at(decision))

    def _next(self, decision: "_Decision") -> tuple[str, ReleaseReason] | None:
        room, overdue = decision.room, self._overdue()
        lanes = self._lanes_now(decision, overdue)
        if overdue is not None and overdue.units <= room.units:
            return (overdue.request_id, ReleaseReason.OVERDUE) if decision.has_credits(overdue.needs) else None
        able = self._firsts(lanes, room.units)
        if not able:
            return None
        first = able[0]
        if not first.lane.traits.low and self._owed >= 1 - self.min_share - 1e-9:
            low = next((one for one in able if one.lane.traits.low), None)
            if low is not None:
                return self._of(low, room.units), ReleaseReason.LOW_SHARE
        longest = self._longest(first, lanes, decision)
        if longest is not None:
            return longest, ReleaseReason.LONGEST
        starts = able if room.idle_units == room.units else self._firsts(lanes, room.idle_units)
        if starts:
            return self._of(starts[0], room.idle_units), ReleaseReason.IDLE
        name = self._of(first, room.units)
        if not decision.window_over:
            ends = self._window_end(lanes, room.units)
            decision.window_over = ends is not None and self._now >= ends
        if decision.window_over:
            return name, ReleaseReason.WINDOW_OVER
        needed = room.least_room(self._entries[name].request.units)
        ready = sum(lane.count(self._now, room.units, needed) for lane in lanes)
        return (name, ReleaseReason.BATCH_FULL) if ready >= needed else None

    def _lanes_now(self, decision: "_Decision", overdue: GateRequest | None) -> list[Lane]:
        """Return the lanes that have credits and are not held back by rule 4."""
        if overdue is not None and not decision.has_credits(overdue.needs):
            return []
        found: list[Lane] = []
        may: dict[Hashable, bool] = {}
        for traits, lane in self._lanes.items():
            if overdue is not None and traits.size:
                continue
            needs = traits.needs
            if needs not in may:
                may[needs] = decision.has_credits(needs)
            if may[needs]:
                found.append(lane)
        return found

    def _firsts(self, lanes: Sequence[Lane], units: float) -> list[First]:
        """Return the first request of each lane that finds room, first to run first."""
        found = [first for lane in lanes if (first := lane.first(self._now, units)) is not None]
        return sorted(found)  # the keys are unique

    def _longest(self, first: First, lanes: Sequence[Lane], decision: "_Decision") -> str | None:
        """Return the request that has to go ahead of the first one (rule 7), if any."""
        if decision.ends_last == math.inf or len(self._ahead) >= MOST_AHEAD:
            return None
        peers = peers_by_key(first.key)
        if peers is None:
            return None
        units = decision.room.units
        found = [one for lane in lanes if (one := lane.longest(peers, self._now, units)) is not None]
        cost = -min(found).minus_cost  # the first one is among them
        if cost < decision.ends_last or cost <= self._entries[first.request_id].request.waiting.cost_seconds:
            return None
        return min(found).request_id

    def _of(self, first: First, units: float) -> str:
        return first.lane.next(first, self._now, units)

    def _overdue(self) -> GateRequest | None:
        """Return the oldest request if rule 4 applies to it; no other was passed more often."""
        entry = next(iter(self._entries.values()))
        return entry.request if len(self._released) >= self.max_passed else None

    def _window_end(self, lanes: Sequence[Lane], units: float) -> float | None:
        """Return when the batching window of the earliest arrival that finds room is over."""
        came = [at for lane in lanes if (at := lane.came(self._now, units)) is not None]
        return min(came) + self.max_hold_seconds if came else None

    def _wake_at(self, decision: "_Decision") -> float | None:
        if not (self.max_hold_seconds and self._entries and decision.room.has_room()):
            return None
        return self._window_end(self._lanes_now(decision, self._overdue()), decision.room.units)

    def _count(self, released: GateRequest, reason: ReleaseReason) -> None:
        name = released.request_id
        number, traits = self._entries[name].number, traits_of(released)
        lane = self._lanes[traits]
        lane.take(name)
        if not lane:
            del self._lanes[traits]
        insort(self._released, number)
        if reason is ReleaseReason.LONGEST:
            insort(self._ahead, number)
        self._forget(name)
        if released.low:
            self._owed = max(self._owed - (1 - self.min_share), 0.0)
        elif self._low:
            self._owed = min(self._owed + self.min_share, 1.0)

    def _out_of_lane(self, request: GateRequest) -> None:
        traits = traits_of(request)
        lane = self._lanes[traits]
        lane.remove(request.request_id)
        if not lane:
            del self._lanes[traits]

    def _forget(self, request_id: str) -> None:
        gone = self._entries.pop(request_id).request
        self._low -= gone.low
        self._waiting_seconds -= gone.waiting.cost_seconds
        oldest = next(iter(self._entries.values()), None)
        if oldest is None:
            self._released.clear()
            self._ahead.clear()
            self._waiting_seconds = 0.0  # exactly
        else:
            del self._released[: bisect_right(self._released, oldest.number)]
            del self._ahead[: bisect_right(self._ahead, oldest.number)]


def ends_last_seconds(waiting_seconds: float, replicas: Sequence[ReplicaState]) -> float:
    """Return the least cost of a request that ends last if it waits longer; ``inf`` if no order could change that.

    It is c where one replica needs as long for c as all of them for the rest of the work: of m replicas, the whole
    work / (m + 1). All count as equally fast, because the speeds that are learnt vary from one request to the next.

    Args:
        waiting_seconds: the cost of all waiting requests.
        replicas: all replicas, of which the healthy ones count.
    """
    running = [one.remaining_seconds for one in replicas if one.healthy]
    if len(running) < 2:
        return math.inf
    return (waiting_seconds + sum(running)) / (len(running) + 1) * _ROUNDING


@dataclass
class _Decision:
    """State of one decision while it is made."""

    room: GateRoom
    terms: GateTerms
    closed: set[Hashable] = field(default_factory=set)  # needs of requests whose credits could not be taken after all
    window_over: bool = False  # if so, the whole batch goes
    ends_last: float = math.inf  # least cost of a request that goes ahead by rule 7

    def has_credits(self, needs: Hashable) -> bool:
        return needs not in self.closed and self.terms.has_credits(needs)
