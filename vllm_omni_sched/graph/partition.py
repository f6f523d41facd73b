"""Plan which stages share a device and which are split over several, and replan when it pays or must be done.

`partition_model` has the input and the costs, `partition_search` finds the best assignment, and `Partitioner` decides
when to plan again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from vllm_omni_sched.graph.partition_model import Assignment, PartitionSnapshot, Score
from vllm_omni_sched.graph.partition_search import Found, Shortage, best_partition, greedy


class PartitionReason(str, Enum):
    """Reason for a partition plan."""

    FIRST = "first"  # there was no plan before
    HELD = "held"  # no plan is better by `min_gain`
    COSTLY = "costly"  # a plan is better by `min_gain`, but does not pay for its moves within the horizon
    COOLDOWN = "cooldown"  # no search: the last change or search is too recent
    BETTER = "better"  # changed: at least `min_gain` more throughput, also after paying for the moves
    PRESSURE = "pressure"  # changed: the current one no longer fits
    CHANGED = "changed"  # changed: a stage or a device was added or removed
    IMPOSSIBLE = "impossible"  # no assignment fits
    NOT_FOUND = "not_found"  # the search found no assignment that fits, and was cut short


class StageAction(str, Enum):
    """What a plan does with a stage."""

    PLACED = "placed"  # on a device of its own; there was no plan before
    SPLIT = "split"  # over more devices than before, or than one
    NARROWED = "narrowed"  # to fewer devices than before
    JOINED = "joined"  # to a device where another stage is that it did not share with before
    MOVED = "moved"  # to other devices
    LEFT = "left"  # where it was


class StageReason(str, Enum):
    """Why a plan does that with a stage, compared with the best of the alternatives while all others are as planned.

    Alternatives to a split are places with fewer devices; to joining, places without other stages; to a move or to
    narrowing, the former place; to being left or placed, all other places.
    """

    ALONE = "alone"  # there is no alternative
    MEMORY = "memory"  # the alternatives do not fit
    THROUGHPUT = "throughput"  # each alternative answers fewer requests per second
    LATENCY = "latency"  # each alternative that answers as many takes longer for each, also because of transfers
    MOVE_COST = "move_cost"  # an alternative is better, but does not gain enough to move
    EQUAL = "equal"  # an alternative is as good, or better only for stages that move together


class StageDecision(NamedTuple):
    """What a plan does with a stage, and why."""

    stage_id: int
    place: str
    action: StageAction
    reason: StageReason

    def __str__(self) -> str:
        return f"stage {self.stage_id} is {self.action.value} on {self.place} ({self.reason.value})"


@dataclass(frozen=True)
class Plan:
    """Assignment of stages to devices with its expected performance; ``assignment`` is None where nothing fits.

    ``throughput``: requests per second of a full pipeline; 0 where nothing fits, ``inf`` where nothing takes time.
    ``latency_seconds``: latency of a request that never queues.
    ``moves``: stages that change their place.
    ``proven``: no assignment that leaves the headroom is better; False if the search was cut short or skipped.
    ``shortage``: where nothing fits, a stage that found no memory.
    ``decisions``: for each stage, by id; empty where nothing fits and during a cooldown.
    """

    assignment: Assignment | None
    throughput: float
    latency_seconds: float
    reason: PartitionReason
    moves: int = 0
    proven: bool = False
    shortage: Shortage | None = None
    decisions: tuple[StageDecision, ...] = ()

    @property
    def merged(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages that share a device, for each device with more than one."""
        on: dict[str, list[int]] = {}
        for stage_id, place in (self.assignment or {}).items():
            for device in place.split(","):
                on.setdefault(device, []).append(stage_id)
        return tuple(sorted({tuple(sorted(stages)) for stages in on.values() if len(stages) > 1}))

    @property
    def changes(self) -> tuple[StageDecision, ...]:
        """Return the decisions for the stages that are not left where they were."""
        return tuple(one for one in self.decisions if one.action is not StageAction.LEFT)

    def __str__(self) -> str:
        if self.shortage is not None:
            stage_id, lacks = self.shortage.stage_id, self.shortage.missing_bytes
            return f"{self.reason.value}: stage {stage_id} lacks {lacks} bytes on the device with the most free memory"
        where = ", ".join(f"{stage} on {place}" for stage, place in sorted((self.assignment or {}).items()))
        return f"{self.reason.value}: stages {where}"


class Partitioner:
    """Plans on which devices each stage runs, and changes a plan only when it pays.

    1. The best plan has the highest throughput, less what its moves cost; of several, the one with the least latency,
       then with the fewest moves (`best_partition`). Transfers count in both: a link bounds the throughput as a device
       does.
    2. Without a plan, or when the current one no longer fits in memory, or does not name these stages and
       devices, it plans at once.
    3. Otherwise it changes only for ``min_gain`` more throughput after the cost of the moves (`Score.paid_seconds`),
       ``cooldown_seconds`` after the last change; it searches at most once in ``look_seconds``, since a search may
       take a second.
    4. A new plan leaves ``headroom`` of each device's memory free; under rule 2 it gives that up if necessary. The
       current plan may use all memory. So memory that swings by less than that does not move a stage to and fro, and
       a device whose memory swings by more causes at most two changes in ``cooldown_seconds``: away, and back.
    5. Where nothing fits there is no assignment, and the plan names a stage that found no memory.

    The times of the last change and search are kept here; the caller passes the current assignment.

    Args:
        max_nodes: most partial assignments that the search examines.
    """

    def __init__(
        self,
        min_gain: float = 0.1,
        cooldown_seconds: float = 60.0,
        headroom: float = 0.1,
        look_seconds: float = 5.0,
        max_nodes: int = 20_000,
    ) -> None:
        self.min_gain = min_gain
        self.cooldown_seconds = cooldown_seconds
        self.headroom = headroom
        self.look_seconds = look_seconds
        self.max_nodes = max_nodes
        self._not_before = -math.inf  # time of the next search for something better

    def plan(self, snapshot: PartitionSnapshot, current: Assignment | None, now: float) -> Plan:
        """Return the plan for this snapshot; ``current`` is the running assignment, None if nothing runs yet."""
        if current is None:
            return self._anew(snapshot, None, PartitionReason.FIRST, now)
        if not snapshot.covers(current):
            return self._anew(snapshot, current, PartitionReason.CHANGED, now)
        if not snapshot.fits(current):
            return self._anew(snapshot, current, PartitionReason.PRESSURE, now)
        held = snapshot.score(current, current)
        if now < self._not_before:
            return _plan(current, held, PartitionReason.COOLDOWN, proven=False)
        found = best_partition(snapshot, current, self.headroom, self.max_nodes)
        if found.assignment is not None:
            score = snapshot.score(found.assignment, current)
            if score.moves and score.paid_seconds * (1 + self.min_gain) < held.busiest_seconds:
                self._not_before = now + self.cooldown_seconds
                plan = _plan(found.assignment, score, PartitionReason.BETTER, found.proven)
                return replace(plan, decisions=self._decisions(snapshot, found.assignment, current))
        self._not_before = now + self.look_seconds
        reason = PartitionReason.COSTLY if self._too_costly(snapshot, current, held) else PartitionReason.HELD
        plan = _plan(current, held, reason, found.proven)
        return replace(plan, decisions=self._decisions(snapshot, current, current))

    def _too_costly(self, snapshot: PartitionSnapshot, current: Assignment, held: Score) -> bool:
        """Return whether the heuristic finds a plan that is better by ``min_gain`` if moves cost nothing."""
        if math.isinf(snapshot.load_bytes_per_second):
            return False
        free = replace(snapshot, load_bytes_per_second=math.inf)
        found = best_partition(free, current, self.headroom, max_nodes=0)
        if found.assignment is None:
            return False
        return free.score(found.assignment).busiest_seconds * (1 + self.min_gain) < held.busiest_seconds

    def _anew(self, snapshot: PartitionSnapshot, current: Assignment | None, why: PartitionReason, now: float) -> Plan:
        found = Found(None, True)
        for headroom in dict.fromkeys((self.headroom, 0.0)):
            found = best_partition(snapshot, current, headroom, self.max_nodes)
            if found.assignment is not None:
                self._not_before = now + self.cooldown_seconds
                plan = _plan(found.assignment, snapshot.score(found.assignment, current), why, found.proven)
                return replace(plan, decisions=self._decisions(snapshot, found.assignment, current, headroom))
        reason = PartitionReason.IMPOSSIBLE if found.proven else PartitionReason.NOT_FOUND
        lacking = greedy(snapshot, 0.0, by_load=False)
        shortage = lacking if isinstance(lacking, Shortage) else None
        return Plan(None, 0.0, math.inf, reason, proven=found.proven, shortage=shortage)

    def _decisions(
        self,
        snapshot: PartitionSnapshot,
        assignment: Assignment,
        current: Assignment | None,
        headroom: float | None = None,
    ) -> tuple[StageDecision, ...]:
        room = self.headroom if headroom is None else headroom
        return tuple(_decisions(snapshot, assignment, current, room))


def _plan(assignment: Assignment, score: Score, reason: PartitionReason, proven: bool) -> Plan:
    throughput = 1 / score.busiest_seconds if score.busiest_seconds else math.inf
    return Plan(dict(assignment), throughput, score.latency_seconds, reason, score.moves, proven)


def _beside(assignment: Assignment, stage_id: int, place: str | None = None) -> set[int]:
    """Return the stages on devices of a stage, if it were at the given place."""
    mine = set((place or assignment[stage_id]).split(","))
    return {one for one, where in assignment.items() if one != stage_id and mine & set(where.split(","))}


def _decisions(
    snapshot: PartitionSnapshot, assignment: Assignment, current: Assignment | None, headroom: float
) -> Iterator[StageDecision]:
    for stage_id, place in sorted(assignment.items()):
        former = (current or {}).get(stage_id)
        degree, before = place.count(",") + 1, (former or "").count(",") + 1
        joined = _beside(assignment, stage_id)
        if former is not None and stage_id in (current or {}):
            joined = joined - _beside(current or {}, stage_id)
        others = [one for one in snapshot.places[stage_id] if one != place]
        if place == former:
            action = StageAction.LEFT
        elif degree > before:
            action, others = StageAction.SPLIT, [one for one in others if one.count(",") + 1 < degree]
        elif degree < before:
            action, others = StageAction.NARROWED, [former or ""]
        elif joined:
            action, others = StageAction.JOINED, [one for one in others if not _beside(assignment, stage_id, one)]
        elif former is not None:
            action, others = StageAction.MOVED, [former]
        else:
            action = StageAction.PLACED
        known = [one for one in others if one in snapshot.places[stage_id]]
        yield StageDecision(stage_id, place, action, _reason(snapshot, assignment, stage_id, known, headroom, action))


_NEAR = 1e-9  # relative difference below which two times are equal


def _reason(
    snapshot: PartitionSnapshot,
    assignment: Assignment,
    stage_id: int,
    others: list[str],
    headroom: float,
    action: StageAction,
) -> StageReason:
    """Return why a stage is where it is, and not in one of the other places."""
    if not others:
        return StageReason.ALONE
    alternatives = [{**assignment, stage_id: one} for one in others]
    scores = [snapshot.score(one) for one in alternatives if snapshot.fits(one, headroom)]
    if not scores:
        return StageReason.MEMORY
    mine = snapshot.score(assignment)
    busiest = min(score.busiest_seconds for score in scores)
    if busiest > mine.busiest_seconds * (1 + _NEAR):
        return StageReason.THROUGHPUT
    if action is StageAction.LEFT and busiest < mine.busiest_seconds * (1 - _NEAR):
        return StageReason.MOVE_COST
    as_quick = [one for one in scores if one.busiest_seconds <= mine.busiest_seconds * (1 + _NEAR)]
    latency = min(score.latency_seconds for score in as_quick)
    return StageReason.LATENCY if latency > mine.latency_seconds * (1 + _NEAR) else StageReason.EQUAL
