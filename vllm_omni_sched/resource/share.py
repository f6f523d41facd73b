"""Which waiting items are encoded in the step, which beside it, and with what share of the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.lane_share import DecodeLoad, LaneShare, ShareReason


class Where(str, Enum):
    """Where a group of items is encoded."""

    IN_STEP = "in_step"  # by this step, at full width, while decoding waits
    LANE = "lane"  # beside the steps
    WAIT = "wait"  # not yet


class WhereReason(str, Enum):
    """Why there."""

    NO_LANE = "no_lane"  # in the step: there is nowhere else
    NO_DECODE = "no_decode"  # in the step: nobody is held up
    TOO_LONG = "too_long"  # in the lane: nobody is held up now, but somebody could arrive
    AGED = "aged"  # in the step: waited `max_wait_seconds`
    WOULD_NOT_BE_NOTICED = "would_not_be_noticed"  # in the step: ends within the ITL target
    DEADLINE = "deadline"  # in the step: the lane would be too late for it
    WOULD_STALL_DECODE = "would_stall_decode"  # in the lane
    LANE_FULL = "lane_full"  # waits: it would stall decoding, and the lane has no room


@dataclass(frozen=True)
class EncodeGroup:
    """Items that are encoded together.

    ``seconds_each``: estimated encode time of one item at full width.
    ``waiting_since``, ``deadline``: by the clock of ``now``; the earliest deadline among those who
    wait for it, ``inf`` for none.

    Raises:
        ValueError: it has no items, or its time is negative or not finite.
    """

    key: str
    num_items: int
    seconds_each: float
    waiting_since: float
    deadline: float = math.inf

    def __post_init__(self) -> None:
        if self.num_items < 1:
            raise ValueError(f"group {self.key!r}: num_items must be 1 or more, got {self.num_items}")
        if not 0 <= self.seconds_each < math.inf:
            raise ValueError(f"group {self.key!r}: seconds_each must be finite and >= 0, got {self.seconds_each}")

    @property
    def seconds(self) -> float:
        """Estimated encode time of all its items at full width."""
        return self.num_items * self.seconds_each


@dataclass(frozen=True)
class EncodeSnapshot:
    """What the choice depends on.

    ``lane_room``: groups that the lane takes now, 0 while it is busy; None where there is no lane.
    ``lane_backlog_seconds``: how long the lane will be busy with what it has.
    ``in_step_seconds``, ``in_lane_seconds``: measured encode time of one item, None before there is one.
    """

    decoding: tuple[DecodeLoad, ...]
    groups: tuple[EncodeGroup, ...]
    lane_room: int | None
    lane_backlog_seconds: float = 0.0
    in_step_seconds: float | None = None
    in_lane_seconds: float | None = None


@dataclass(frozen=True)
class Placement:
    """Where one group goes, and why."""

    key: str
    where: Where
    reason: WhereReason


@dataclass(frozen=True)
class EncodePlan:
    """One placement for each group, in their order, and the lane's share of the device."""

    placements: tuple[Placement, ...]
    lane_share: float
    share_reason: ShareReason


class EncodeShare:
    """Who encodes where. The first rule that fits a group decides:

    1. There is no lane, or nobody decodes and it ends within ``max_alone_seconds``: in the step, at full width.
       One that takes longer goes to the lane, which is as quick while nobody decodes: who arrives in the
       middle of a step waits for its end.
    2. It has waited ``max_wait_seconds``: in the step; one such group per step, the oldest. So a
       group that has aged is encoded after as many steps as there were older groups waiting.
    3. Its time fits into what the ITL targets leave of this step: in the step. What is left counts
       down from group to group, and is nothing while the P99 of a class is over its target.
    4. In the lane it would miss its deadline, in the step it would not: in the step, one per step,
       and only if it takes no more than ``max_stall`` times the tightest ITL target.
    5. The lane has room: in the lane.
    6. Otherwise it waits.

    Groups are looked at by deadline, then by how long they wait. The time in the lane is the time in the step
    times the measured ratio of the two; while that is unknown, divided by the lane's share.
    The share is `LaneShare`'s.

    Raises:
        ConfigError: ``max_wait_seconds`` is not above 0, or another number is negative.
    """

    def __init__(
        self,
        lane: LaneShare,
        max_wait_seconds: float = 5.0,
        max_stall: float = 2.0,
        max_alone_seconds: float = math.inf,
    ) -> None:
        if not max_wait_seconds > 0:
            raise ConfigError(f"max_wait_seconds must be above 0, got {max_wait_seconds}")
        for name, value in (("max_stall", max_stall), ("max_alone_seconds", max_alone_seconds)):
            if not value >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {value}")
        self.lane = lane
        self.max_wait_seconds = max_wait_seconds
        self.max_stall = max_stall
        self.max_alone_seconds = max_alone_seconds

    def plan(self, snapshot: EncodeSnapshot, now: float) -> EncodePlan:
        """Place all waiting groups of one step, and move the lane's share on."""
        share, share_reason = self.lane.update(snapshot.decoding, now)
        return EncodePlan(self.place(snapshot, share, now), share, share_reason)

    def place(self, snapshot: EncodeSnapshot, share: float, now: float) -> tuple[Placement, ...]:
        """Place some groups, at the lane's present share."""
        placed = _Choice(self, snapshot, share, now).place_all()
        return tuple(placed[i] for i in range(len(snapshot.groups)))


class _Choice:
    """The choices of one step, with what they use up."""

    def __init__(self, policy: EncodeShare, snapshot: EncodeSnapshot, share: float, now: float) -> None:
        self.policy, self.snapshot, self.now = policy, snapshot, now
        self.decoding = [load for load in snapshot.decoding if load.num_decoding]
        self.unnoticed_seconds = _room_in_step(self.decoding)
        self.stall_seconds = policy.max_stall * min((d.itl_target_seconds for d in self.decoding), default=math.inf)
        self.lane_room = snapshot.lane_room or 0
        self.lane_seconds = snapshot.lane_backlog_seconds
        self.step_seconds = 0.0
        self.slowdown = 1 / share
        if snapshot.in_step_seconds and snapshot.in_lane_seconds:
            self.slowdown = snapshot.in_lane_seconds / snapshot.in_step_seconds
        self.rescued = False
        aged = [i for i, g in enumerate(snapshot.groups) if now - g.waiting_since >= policy.max_wait_seconds]
        self.oldest = min(aged, key=lambda i: (snapshot.groups[i].waiting_since, i), default=None)

    def place_all(self) -> dict[int, Placement]:
        groups = self.snapshot.groups
        order = sorted(range(len(groups)), key=lambda i: (groups[i].deadline, groups[i].waiting_since, i))
        if self.oldest is not None:  # it goes in any case, so it uses up room first
            order.remove(self.oldest)
            order.insert(0, self.oldest)
        return {i: self._place(i, groups[i]) for i in order}

    def _place(self, i: int, group: EncodeGroup) -> Placement:
        reason = self._in_step_because(i, group)
        if reason is not None:
            self.unnoticed_seconds -= group.seconds
            self.step_seconds += group.seconds
            return Placement(group.key, Where.IN_STEP, reason)
        if self.lane_room > 0:
            self.lane_room -= 1
            self.lane_seconds += group.seconds * self.slowdown
            why = WhereReason.WOULD_STALL_DECODE if self.decoding else WhereReason.TOO_LONG
            return Placement(group.key, Where.LANE, why)
        return Placement(group.key, Where.WAIT, WhereReason.LANE_FULL)

    def _in_step_because(self, i: int, group: EncodeGroup) -> WhereReason | None:
        if self.snapshot.lane_room is None:
            return WhereReason.NO_LANE
        if not self.decoding:
            alone = self.step_seconds + group.seconds <= self.policy.max_alone_seconds or self.lane_room < 1
            return WhereReason.NO_DECODE if alone else None
        if i == self.oldest:
            return WhereReason.AGED
        if group.seconds <= self.unnoticed_seconds:
            return WhereReason.WOULD_NOT_BE_NOTICED
        in_step = self.step_seconds + group.seconds
        lane_ends = self.now + self.lane_seconds + group.seconds * self.slowdown
        saved_by_step = self.now + in_step <= group.deadline and (lane_ends > group.deadline or self.lane_room < 1)
        if saved_by_step and group.deadline < math.inf and in_step <= self.stall_seconds and not self.rescued:
            self.rescued = True
            return WhereReason.DEADLINE
        return None


def _room_in_step(decoding: Sequence[DecodeLoad]) -> float:
    """Seconds by which this step may be longer and still meet every class's ITL target."""
    room = math.inf
    for load in decoding:
        if load.itl_target_seconds == math.inf:
            continue  # nothing was promised
        if load.itl_seconds is None or (load.itl_p99_seconds or 0.0) > load.itl_target_seconds:
            return 0.0  # nothing is known to be free
        room = min(room, load.itl_target_seconds - load.itl_seconds)
    return max(room, 0.0)
