"""Plan which stages share a device and which are split into a pipeline, and replan when it pays or must be done."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.graph.partition_model import PartitionSnapshot, Score
from vllm_omni_sched.graph.partition_search import Found, Shortage, best_partition, greedy


class PartitionReason(str, Enum):
    """Reason for a partition plan."""

    FIRST = "first"  # there was no plan before
    HELD = "held"  # no plan is better by `min_gain`
    COOLDOWN = "cooldown"  # no search: the last change or search is too recent
    BETTER = "better"  # changed: at least `min_gain` more throughput
    PRESSURE = "pressure"  # changed: the current one no longer fits
    CHANGED = "changed"  # changed: a stage or a device was added or removed
    IMPOSSIBLE = "impossible"  # no assignment fits
    NOT_FOUND = "not_found"  # the search found no assignment that fits, and was cut short


@dataclass(frozen=True)
class Plan:
    """Assignment of stages to devices with its expected performance; ``assignment`` is None where nothing fits.

    ``throughput``: requests per second of a full pipeline; 0 where nothing fits, ``inf`` where nothing takes time.
    ``latency_seconds``: latency of a request that never queues.
    ``moves``: stages that change their device.
    ``proven``: no assignment that leaves the headroom is better; False if the search was cut short or skipped.
    ``shortage``: where nothing fits, a stage that found no memory.
    """

    assignment: Mapping[int, str] | None
    throughput: float
    latency_seconds: float
    reason: PartitionReason
    moves: int = 0
    proven: bool = False
    shortage: Shortage | None = None

    @property
    def merged(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages that share a device, for each device with more than one."""
        on: dict[str, list[int]] = {}
        for stage_id, device in (self.assignment or {}).items():
            on.setdefault(device, []).append(stage_id)
        return tuple(sorted(tuple(sorted(stages)) for stages in on.values() if len(stages) > 1))

    def __str__(self) -> str:
        if self.shortage is not None:
            stage_id, lacks = self.shortage.stage_id, self.shortage.missing_bytes
            return f"{self.reason.value}: stage {stage_id} lacks {lacks} bytes on the device with the most free memory"
        where = ", ".join(f"{stage} on {device}" for stage, device in sorted((self.assignment or {}).items()))
        return f"{self.reason.value}: stages {where}"


class Partitioner:
    """Plans which stage runs on which device, and changes a plan only when it pays.

    1. The best plan has the highest throughput; of several, the one with the least latency, then with the fewest
       moves (`best_partition`).
    2. Without a plan, or when the current one no longer fits in memory, or does not name these stages and
       devices, it plans at once.
    3. Otherwise it changes only for ``min_gain`` more throughput, ``cooldown_seconds`` after the last change; it
       searches at most once in ``look_seconds``, since a search may take a second.
    4. A new plan leaves ``headroom`` of each device's memory free; under rule 2 it gives that up if necessary. The
       current plan may use all memory. So memory that swings by less than that does not move a stage to and fro, and
       a device whose memory swings by more causes at most two changes in ``cooldown_seconds``: away, and back.
    5. Where nothing fits there is no assignment, and the plan names a stage that found no memory.

    The times of the last change and search are kept here; the caller passes the current assignment.

    Args:
        max_nodes: most partial assignments that the search examines.

    Raises:
        ConfigError: ``headroom`` is not in [0, 1), or another argument is negative.
    """

    def __init__(
        self,
        min_gain: float = 0.1,
        cooldown_seconds: float = 60.0,
        headroom: float = 0.1,
        look_seconds: float = 5.0,
        max_nodes: int = 20_000,
    ) -> None:
        for name, value in (
            ("min_gain", min_gain),
            ("cooldown_seconds", cooldown_seconds),
            ("look_seconds", look_seconds),
            ("max_nodes", max_nodes),
        ):
            if not value >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {value}")
        if not 0 <= headroom < 1:
            raise ConfigError(f"headroom must be in [0, 1), got {headroom}")
        self.min_gain = min_gain
        self.cooldown_seconds = cooldown_seconds
        self.headroom = headroom
        self.look_seconds = look_seconds
        self.max_nodes = max_nodes
        self._not_before = -math.inf  # time of the next search for something better

    def plan(self, snapshot: PartitionSnapshot, current: Mapping[int, str] | None, now: float) -> Plan:
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
            if score.moves and score.busiest_seconds * (1 + self.min_gain) < held.busiest_seconds:
                self._not_before = now + self.cooldown_seconds
                return _plan(found.assignment, score, PartitionReason.BETTER, found.proven)
        self._not_before = now + self.look_seconds
        return _plan(current, held, PartitionReason.HELD, found.proven)

    def _anew(
        self, snapshot: PartitionSnapshot, current: Mapping[int, str] | None, why: PartitionReason, now: float
    ) -> Plan:
        found = Found(None, True)
        for headroom in dict.fromkeys((self.headroom, 0.0)):
            found = best_partition(snapshot, current, headroom, self.max_nodes)
            if found.assignment is not None:
                self._not_before = now + self.cooldown_seconds
                return _plan(found.assignment, snapshot.score(found.assignment, current), why, found.proven)
        reason = PartitionReason.IMPOSSIBLE if found.proven else PartitionReason.NOT_FOUND
        lacking = greedy(snapshot, 0.0, by_load=False)
        shortage = lacking if isinstance(lacking, Shortage) else None
        return Plan(None, 0.0, math.inf, reason, proven=found.proven, shortage=shortage)


def _plan(assignment: Mapping[int, str], score: Score, reason: PartitionReason, proven: bool) -> Plan:
    throughput = 1 / score.busiest_seconds if score.busiest_seconds else math.inf
    return Plan(dict(assignment), throughput, score.latency_seconds, reason, score.moves, proven)
