"""What a stage is given now, and to which replica."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.balance import Balancer, CostBalancer, Dice, ReplicaState


class ReleaseReason(str, Enum):
    """Why a request is released now."""

    IDLE = "idle"  # a replica has nothing to do
    ALONE = "alone"  # it shares no batch with others, so there is none to wait for
    BATCH_FULL = "batch_full"  # it fills its replica, with those released along with it
    WINDOW_OVER = "window_over"  # the batching window of one is over, and the batch goes as it is
    LOW_SHARE = "low_share"  # the share of the low class
    OVERDUE = "overdue"  # passed over as often as may be


class HoldReason(str, Enum):
    """Why a request is not released now."""

    NO_ROOM = "no_room"  # no healthy replica has room in its batch
    NO_CREDITS = "no_credits"  # a stage further on has no room for it
    UNITS = "units"  # it is long, and as much long work runs already as should
    WINDOW = "window"  # for more to come, until its batching window is over
    BEHIND_OVERDUE = "behind_overdue"  # one that has been passed over too often, and has no credits yet, is first


@dataclass(frozen=True)
class GateRequest:
    """A request that waits before the stage.

    ``has_credits``: the stages after this one have room for it.
    ``mergeable``: it may run in one batch with others; one that may not is never held for them.
    ``low``: of the class that has only its share while others wait.
    ``warm``: the part of its cache that each replica has, by replica id, where not 0.
    ``units``: of long work; 0 for short work, which no limit of units holds back.
    ``distances``: seconds that getting its input to each replica takes, by replica id, where not 0.

    Raises:
        ValueError: the cost is negative or not finite, or the units are negative.
    """

    request_id: str
    cost_seconds: float = 0.0
    has_credits: bool = True
    mergeable: bool = True
    low: bool = False
    warm: tuple[tuple[int, float], ...] = ()
    units: int = 0
    distances: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.cost_seconds < math.inf:
            raise ValueError(f"request {self.request_id!r}: cost_seconds must be finite and >= 0")
        if self.units < 0:
            raise ValueError(f"request {self.request_id!r}: units must be 0 or more, got {self.units}")


@dataclass(frozen=True)
class GateSnapshot:
    """The stage at ``now``: who waits, first to run first, and the replicas; ``limit`` is that of their batch."""

    now: float
    waiting: tuple[GateRequest, ...]
    replicas: tuple[ReplicaState, ...]


@dataclass(frozen=True)
class Release:
    """A request may start, on that replica."""

    request_id: str
    replica_id: int
    reason: ReleaseReason


@dataclass(frozen=True)
class GatePlan:
    """What to release, in that order; why each of the others waits; and when to ask again if nothing happens."""

    releases: tuple[Release, ...] = ()
    held: tuple[tuple[str, HoldReason], ...] = ()
    wake_at: float | None = None


class StageGate:
    """Releases requests into a stage while its replicas have room; the order is the caller's.

    1. A replica is given no more than its limit. Of those with room the balancer picks, by cost.
    2. First to run first, but for rules 3 and 4. A request without credits lets those behind it go before.
    3. While others wait too, the low class has ``min_share`` of the releases.
    4. A request is passed over, by one that came later, at most ``max_passed`` times: then it is first, and while it
       has no credits nobody goes. Of several, the one that came first.
    5. Where every replica with room is busy, a request is held up to ``max_hold_seconds`` from when it came, until
       there are enough to fill the batch. Never while a replica with room is idle: that would only cost time. What
       goes by rule 3 or 4 is not held.
    6. A long request (``units``) goes where no other long one runs, or where they stay within the limit of units. While
       there is no such replica, others go before it; once rule 4 holds for it, only short ones do, so the long ones
       that run end, and then it goes.

    Args:
        balancer: default: ``CostBalancer()``.
        max_hold_seconds: 0 for no batching window.
        min_share: in [0, 1); 0 leaves the low class to rule 4.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        balancer: Balancer | None = None,
        max_hold_seconds: float = 0.05,
        min_share: float = 0.1,
        max_passed: int = 64,
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
        self._came: dict[str, tuple[int, float]] = {}  # number and time, of who waits; in that order
        self._number = 0
        self._passed: dict[str, int] = {}
        self._owed = 0.0  # releases, to the low class

    def came(self, request_id: str, now: float) -> None:
        """A request waits from now on. One that is first seen in a snapshot came then."""
        if request_id not in self._came:
            self._came[request_id] = self._number, now
            self._number += 1

    def passed(self, request_id: str) -> int:
        """How often others who came later were released before it."""
        return self._passed.get(request_id, 0)

    def plan(self, snapshot: GateSnapshot, dice: Dice) -> GatePlan:
        """What to release now. One that stays in the snapshots was not started after all, and keeps its place.

        Raises:
            ValueError: two requests have the same id.
        """
        self._note(snapshot)
        round_ = _Round(snapshot)
        releases: list[Release] = []
        while round_.left and round_.has_room():
            chosen = self._next(round_, snapshot.now)
            if chosen is None:
                break
            request, reason = chosen
            replica_id = round_.place(request, self.balancer, dice, to_fill=reason is ReleaseReason.BATCH_FULL)
            releases.append(Release(request.request_id, replica_id, reason))
            self._count(request, round_)
        held = tuple((one.request_id, self._why(one, round_)) for one in round_.left.values())
        ends = [self._window_end(name) for name, reason in held if reason is HoldReason.WINDOW]
        return GatePlan(tuple(releases), held, min(ends, default=None))

    def _note(self, snapshot: GateSnapshot) -> None:
        names = {one.request_id for one in snapshot.waiting}
        if len(names) < len(snapshot.waiting):
            raise ValueError("each waiting request must have its own request_id")
        for name in [name for name in self._came if name not in names]:
            del self._came[name]
            self._passed.pop(name, None)
        for one in snapshot.waiting:
            self.came(one.request_id, snapshot.now)

    def _next(self, round_: "_Round", now: float) -> tuple[GateRequest, ReleaseReason] | None:
        able = [one for one in round_.left.values() if one.has_credits and round_.takes(one)]
        if (overdue := self._overdue(round_)) is not None:
            if not overdue.has_credits:
                return None
            if round_.takes(overdue):
                return overdue, ReleaseReason.OVERDUE
            able = [one for one in able if not one.units]
        if not able:
            return None
        if not able[0].low and self._owed >= 1 - self.min_share - 1e-9:
            low = next((one for one in able if one.low), None)
            if low is not None:
                return low, ReleaseReason.LOW_SHARE
        starts = next((one for one in able if round_.takes(one, idle=True)), None)
        if starts is not None:
            return starts, ReleaseReason.IDLE
        alone = next((one for one in able if not one.mergeable), None)
        if alone is not None:
            return alone, ReleaseReason.ALONE
        round_.window_over = round_.window_over or any(now >= self._window_end(one.request_id) for one in able)
        if round_.window_over:
            return able[0], ReleaseReason.WINDOW_OVER
        return (able[0], ReleaseReason.BATCH_FULL) if len(able) >= round_.least_room(able[0]) else None

    def _overdue(self, round_: "_Round") -> GateRequest | None:
        """Of those left, who came first was passed over most often: each that passed a later one has passed it too."""
        oldest = next((name for name in self._came if name in round_.left), None)
        return round_.left[oldest] if oldest is not None and self.passed(oldest) >= self.max_passed else None

    def _window_end(self, name: str) -> float:
        return self._came[name][1] + self.max_hold_seconds

    def _count(self, released: GateRequest, round_: "_Round") -> None:
        number = self._came[released.request_id][0]
        for name, (came, _) in self._came.items():
            if came >= number:
                break
            if name in round_.left:
                self._passed[name] = self.passed(name) + 1
        if released.low:
            self._owed = max(self._owed - (1 - self.min_share), 0.0)
        elif any(one.low for one in round_.left.values()):
            self._owed = min(self._owed + self.min_share, 1.0)

    def _why(self, one: GateRequest, round_: "_Round") -> HoldReason:
        if not one.has_credits:
            return HoldReason.NO_CREDITS
        if not round_.has_room():
            return HoldReason.NO_ROOM
        if not round_.takes(one):
            return HoldReason.UNITS
        return HoldReason.WINDOW if self._overdue(round_) is None else HoldReason.BEHIND_OVERDUE


class _Round:
    """One plan in the making: who is left, first to run first, and the replicas as they will be."""

    def __init__(self, snapshot: GateSnapshot) -> None:
        self.left = {one.request_id: one for one in snapshot.waiting}
        self.window_over = False  # then the whole batch goes
        self._replicas = {one.replica_id: one for one in snapshot.replicas if one.healthy}
        self._idle = {one.replica_id for one in snapshot.replicas if one.healthy and one.in_flight == 0}

    def _with_room(self, units: int = 0) -> Sequence[ReplicaState]:
        return [one for one in self._replicas.values() if one.takes(units)]

    def has_room(self) -> bool:
        return bool(self._with_room())

    def takes(self, request: GateRequest, idle: bool = False) -> bool:
        """Whether there is a replica for it now; an ``idle`` one, if that is asked for.

        What was idle before this round stays so: those released together begin together.
        """
        return any(one.replica_id in self._idle or not idle for one in self._with_room(request.units))

    def least_room(self, request: GateRequest) -> int:
        return min(one.room for one in self._with_room(request.units))

    def place(self, request: GateRequest, balancer: Balancer, dice: Dice, to_fill: bool) -> int:
        """Give it to a replica with room, or ``to_fill``, to one with the least."""
        warm, distances = dict(request.warm), dict(request.distances)
        most = self.least_room(request) if to_fill else math.inf
        choices = [
            replace(
                one,
                warm=warm.get(one.replica_id, one.warm),
                distance_seconds=distances.get(one.replica_id, one.distance_seconds),
            )
            for one in self._with_room(request.units)
            if one.room <= most
        ]
        chosen = balancer.pick(request.cost_seconds, choices, dice).replica_id
        assert chosen is not None  # all of them are healthy
        one = self._replicas[chosen]
        work, units = one.remaining_seconds + request.cost_seconds, one.units + request.units
        self._replicas[chosen] = replace(one, remaining_seconds=work, in_flight=one.in_flight + 1, units=units)
        del self.left[request.request_id]
        return chosen
