"""Decide which waiting requests a stage gets now, and on which replica."""

import math
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.graph.order import WaitingOrder
from vllm_omni_sched.resource.balance import Balancer, CostBalancer, Dice, ReplicaState
from vllm_omni_sched.resource.gate_lanes import Entry, First, Lane, Traits, traits_of
from vllm_omni_sched.resource.gate_room import GateRoom
from vllm_omni_sched.resource.gate_types import GatePlan, GateRequest, GateTerms, Release, ReleaseReason


class StageGate:
    """Releases requests into a stage while its replicas have room, in the order of ``order``.

    1. A replica is given no more than its limit. Of those with room, the balancer picks by cost.
    2. Requests go in order, except by rules 3 and 4. A request without credits lets those behind it go ahead.
    3. While others wait too, the low class gets ``min_share`` of the releases.
    4. Later arrivals pass a request at most ``max_passed`` times: then it is first, and while it
       has no credits no request is released. Of several such requests, the earliest arrival is first.
    5. Where every replica with room is busy, a request is held up to ``max_hold_seconds`` from its arrival, until
       there are enough to fill the batch; never while a replica with room is idle, as that would only cost time.
       Releases by rules 3 and 4 are not held.
    6. A long request (``units``) goes where no other long one runs, or where they stay within the limit of units. While
       there is no such replica, others go ahead of it; once rule 4 applies to it, only short ones do, so the long ones
       that run end, and then it goes.

    The gate is told of each arrival, change and departure, so a decision looks only at the first request of each lane
    and at the replicas: O(log n) for each release, and no waiting request is examined where there is no room.

    Args:
        balancer: default: ``CostBalancer()``.
        max_hold_seconds: 0 for no batching window.
        min_share: in [0, 1); 0 leaves the low class to rule 4 alone.
        order: default: ``WaitingOrder()``.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        balancer: Balancer | None = None,
        max_hold_seconds: float = 0.05,
        min_share: float = 0.1,
        max_passed: int = 64,
        order: WaitingOrder | None = None,
    ) -> None:
        if not 0 <= max_hold_seconds < math.inf:
            raise ConfigError(f"max_hold_seconds must be finite and >= 0, got {max_hold_seconds}")
        if not 0 <= min_share < 1:
            raise ConfigError(f"min_share must be in [0, 1), got {min_share}")
        if max_passed < 1:
            raise ConfigError(f"max_passed must be 1 or more, got {max_passed}")
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
            entry.request = request
        traits = traits_of(request)
        if traits not in self._lanes:
            self._lanes[traits] = Lane(traits, self.order)
        self._now = max(self._now, now)
        self._lanes[traits].push(entry, self._now)
        self._low += request.low

    def remove(self, request_id: str) -> None:
        """Remove a request that was not released; unknown requests are ignored."""
        if request_id in self._entries:
            self._out_of_lane(self._entries[request_id].request)
            self._forget(request_id)

    def release(
        self,
        now: float,
        replicas: Sequence[ReplicaState],
        rng: Dice,
        terms: GateTerms | None = None,
        most: float = math.inf,
    ) -> GatePlan:
        """Release requests, which no longer wait; ``warm`` and the distance in a replica's state apply to all requests.

        Args:
            now: current time; an earlier one than the latest counts as the latest.
            terms: answers the gate's questions about requests.
            most: most releases. For a stage with many replicas, of which some are drawn, it is one, so
                that others are drawn for each release.
        """
        self._now = max(self._now, now)
        decision = _Decision(GateRoom(replicas), terms or GateTerms())
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
            replica_id = decision.room.place(
                request.waiting.cost_seconds,
                request.units,
                (decision.terms.warm(name), decision.terms.distances(name)),
                self.balancer,
                rng,
                to_fill=reason is ReleaseReason.BATCH_FULL,
                other=decision.terms.replica,
            )
            releases.append(Release(name, replica_id, reason))
            self._count(request)
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

    def _count(self, released: GateRequest) -> None:
        name = released.request_id
        number, traits = self._entries[name].number, traits_of(released)
        lane = self._lanes[traits]
        lane.take(name)
        if not lane:
            del self._lanes[traits]
        insort(self._released, number)
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
        self._low -= self._entries.pop(request_id).request.low
        oldest = next(iter(self._entries.values()), None)
        if oldest is None:
            self._released.clear()
        else:
            del self._released[: bisect_right(self._released, oldest.number)]


@dataclass
class _Decision:
    """State of one decision while it is made."""

    room: GateRoom
    terms: GateTerms
    closed: set[Hashable] = field(default_factory=set)  # needs of requests whose credits could not be taken after all
    window_over: bool = False  # if so, the whole batch goes

    def has_credits(self, needs: Hashable) -> bool:
        return needs not in self.closed and self.terms.has_credits(needs)
