"""Plan which stages share a device and which are split into a pipeline, and replan when it pays or must be done.

`PartitionSnapshot` is the input, and scores an assignment of stages to devices. `best_partition` finds the best one by
branch and bound, started from the result of a heuristic. The heuristic is LPT (longest processing time first; on
devices of different speed Gonzalez, Ibarra and Sahni, "Bounds for LPT Schedules on Uniform Processors", SIAM J.
Comput. 1977), improved by moving and swapping stages. Memory makes even finding any assignment a bin-packing problem,
so the heuristic tries stages by size as well, and the search continues where it found none. `Partitioner` decides when
to plan again.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from vllm_omni_sched.config.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """A device; ``speed`` is a multiple of that of the device on which the stages were measured.

    Raises:
        ConfigError: the memory is negative, or the speed is not above 0.
    """

    device_id: str
    memory_bytes: int
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise ConfigError(f"device {self.device_id!r}: memory_bytes must be 0 or more, got {self.memory_bytes}")
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"device {self.device_id!r}: speed must be above 0, got {self.speed}")


@dataclass(frozen=True)
class StageProfile:
    """Resource needs of a stage.

    ``activation_bytes``: for each request of a batch, on top of ``weights_bytes``.
    ``seconds``: for each request, alone on a device of speed 1.
    ``interference``: factor on its seconds when another stage runs on the same device; below 1 where
    the two use resources that the other leaves idle.

    Raises:
        ConfigError: a size or the time is negative, or the factor is not above 0.
    """

    stage_id: int
    weights_bytes: int
    activation_bytes: int
    seconds: float
    interference: float = 1.0

    def __post_init__(self) -> None:
        for name in ("weights_bytes", "activation_bytes", "seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"stage {self.stage_id}: {name} must be 0 or more, got {getattr(self, name)}")
        if not 0 < self.interference < math.inf:
            raise ConfigError(f"stage {self.stage_id}: interference must be above 0, got {self.interference}")


class Score(NamedTuple):
    """Performance of an assignment; compare with `better`.

    ``busiest_seconds``: time of the busiest device per request; a full pipeline finishes one request in this time.
    ``latency_seconds``: latency of a request that never queues: all stages and all transfers, one after the other.
    ``moves``: stages that change their device.
    """

    busiest_seconds: float
    latency_seconds: float
    moves: int


_SAME = 1e-9  # relative; absorbs the rounding of sums in another order


def better(one: Score, other: Score) -> bool:
    """Return whether ``one`` has more throughput than ``other``; if equal, less latency; if equal, fewer moves."""
    for mine, theirs in zip(one, other, strict=True):
        if not math.isclose(mine, theirs, rel_tol=_SAME):
            return mine < theirs
    return False


@dataclass(frozen=True)
class PartitionSnapshot:
    """Devices, stages and costs from which a partition is planned.

    ``transfers``: seconds per request from one stage to another, when they are on different devices.
    ``distances``: factor on these between two devices, in this direction; 1 if a pair is missing.
    ``batch``: requests that every stage must be able to hold at once.

    Raises:
        ConfigError: there is no device or no stage, an id is given twice, a number is out of range,
            or a transfer or distance names an unknown stage or device.
    """

    devices: tuple[Device, ...]
    stages: tuple[StageProfile, ...]
    transfers: Mapping[tuple[int, int], float] = field(default_factory=dict)
    distances: Mapping[tuple[str, str], float] = field(default_factory=dict)
    batch: int = 1

    def __post_init__(self) -> None:
        devices = {device.device_id for device in self.devices}
        stages = {stage.stage_id for stage in self.stages}
        if not devices or not stages:
            raise ConfigError("a partition needs a device and a stage at least")
        if len(devices) < len(self.devices) or len(stages) < len(self.stages):
            raise ConfigError("a device or a stage is given twice; name each once")
        if self.batch < 1:
            raise ConfigError(f"batch must be 1 or more, got {self.batch}")
        _check_pairs("transfers", self.transfers, stages)
        _check_pairs("distances", self.distances, devices)

    def room_of(self, device: Device, headroom: float) -> int:
        """Return the bytes of the device for stages, with the fraction ``headroom`` of its memory left free."""
        return math.floor(device.memory_bytes * (1 - headroom))

    def bytes_of(self, stage: StageProfile) -> int:
        """Return the bytes that the stage needs on its device."""
        return stage.weights_bytes + self.batch * stage.activation_bytes

    def between(self, edge: tuple[int, int], device: str, other: str) -> float:
        """Return the seconds of a transfer from a stage on one device to one on the other."""
        return 0.0 if device == other else self.transfers[edge] * self.distances.get((device, other), 1.0)

    @cached_property
    def _device(self) -> dict[str, Device]:
        return {device.device_id: device for device in self.devices}

    def covers(self, assignment: Mapping[int, str]) -> bool:
        """Return whether the assignment gives each of these stages, and no other, a known device."""
        stages = {stage.stage_id for stage in self.stages}
        return set(assignment) == stages and set(assignment.values()) <= set(self._device)

    def fits(self, assignment: Mapping[int, str], headroom: float = 0.0) -> bool:
        """Return whether every device has enough memory, with the fraction ``headroom`` of it left free."""
        used = dict.fromkeys(self._device, 0)
        for stage in self.stages:
            used[assignment[stage.stage_id]] += self.bytes_of(stage)
        return all(used[name] <= self.room_of(device, headroom) for name, device in self._device.items())

    def score(self, assignment: Mapping[int, str], current: Mapping[int, str] | None = None) -> Score:
        """Return the score of the assignment, whether it fits in memory or not."""
        on: dict[str, list[StageProfile]] = {}
        for stage in self.stages:
            on.setdefault(assignment[stage.stage_id], []).append(stage)
        busy = [
            sum(stage.seconds * (stage.interference if len(merged) > 1 else 1.0) for stage in merged)
            / self._device[name].speed
            for name, merged in on.items()
        ]
        moved = sum(self.between(edge, assignment[edge[0]], assignment[edge[1]]) for edge in self.transfers)
        moves = 0 if current is None else sum(current.get(one) != where for one, where in assignment.items())
        return Score(max(busy), sum(busy) + moved, moves)


def _check_pairs(
    name: str, pairs: Mapping[tuple[int, int], float] | Mapping[tuple[str, str], float], known: set[int] | set[str]
) -> None:
    for pair, value in pairs.items():
        if not set(pair) <= known or pair[0] == pair[1]:
            raise ConfigError(f"{name}: {pair} must name two of {sorted(known)}")
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name}[{pair}] must be 0 or more, got {value}")


@dataclass(frozen=True)
class Found:
    """Best assignment found, None if none fits; ``proven``: there is no better one, or none at all."""

    assignment: Mapping[int, str] | None
    proven: bool


def best_partition(
    snapshot: PartitionSnapshot,
    current: Mapping[int, str] | None = None,
    headroom: float = 0.0,
    max_nodes: int = 50_000,
) -> Found:
    """Return the assignment with the highest throughput, compared with `better`.

    1. The search starts from the result of the heuristic, and from ``current`` if it fits: the result is never worse.
    2. The search examines up to ``max_nodes`` partial assignments and prunes those that cannot become
       better than the best so far. If it completes, the result is proven best.
    3. Where memory is ample, and every interference is between 1 and f, the busiest of m devices takes, even
       with ``max_nodes`` 0, at most f * 2m / (m + 1) times the seconds of the best assignment's.
    """
    best = _Best(snapshot, current, headroom)
    if current is not None and snapshot.covers(current):
        best.offer(dict(current))
    for by_load in (True, False):
        start = greedy(snapshot, headroom, by_load)
        if not isinstance(start, Shortage):
            best.offer(_improved(best, start))
    search = _Search(best, max_nodes)
    search.go_on(0)
    return Found(best.assignment, not search.stopped)


@dataclass(frozen=True)
class Shortage:
    """A stage that fits on no device, and how many bytes the device with the most free memory lacks."""

    stage_id: int
    missing_bytes: int


def greedy(snapshot: PartitionSnapshot, headroom: float, by_load: bool) -> dict[int, str] | Shortage:
    """Assign each stage in turn to the device that finishes it first, the longest first (LPT); or, if not ``by_load``,
    to the device with the least room left, the largest first (best fit decreasing)."""
    done = [0.0] * len(snapshot.devices)
    free = [snapshot.room_of(device, headroom) for device in snapshot.devices]
    found = {}
    for stage in sorted(snapshot.stages, key=lambda one: -one.seconds if by_load else -snapshot.bytes_of(one)):
        needs = snapshot.bytes_of(stage)
        ends = [at + stage.seconds / device.speed for at, device in zip(done, snapshot.devices, strict=True)]
        fitting = [n for n in range(len(free)) if free[n] >= needs]
        if not fitting:
            return Shortage(stage.stage_id, needs - max(free))
        first = min(fitting, key=lambda n: (ends[n] if by_load else free[n], ends[n], n))
        free[first] -= needs
        done[first] = ends[first]
        found[stage.stage_id] = snapshot.devices[first].device_id
    return found


class _Best:
    """Keeps the best assignment so far."""

    def __init__(self, snapshot: PartitionSnapshot, current: Mapping[int, str] | None, headroom: float) -> None:
        self.snapshot = snapshot
        self.current = current
        self.headroom = headroom
        self.assignment: dict[int, str] | None = None
        self.score: Score | None = None

    def score_of(self, assignment: Mapping[int, str]) -> Score | None:
        """Return the score of an assignment, None if it does not fit."""
        if not self.snapshot.fits(assignment, self.headroom):
            return None
        return self.snapshot.score(assignment, self.current)

    def offer(self, assignment: dict[int, str]) -> None:
        score = self.score_of(assignment)
        if score is not None and (self.score is None or better(score, self.score)):
            self.assignment, self.score = assignment, score


_MAX_ROUNDS = 64  # rounds of improvement; few are ever needed


def _improved(best: _Best, start: dict[int, str]) -> dict[int, str]:
    """Return the assignment improved by moving single stages and swapping two, until neither makes it better."""
    assignment, score = start, best.score_of(start)
    for _ in range(_MAX_ROUNDS):
        before = score
        for other in _neighbours(best.snapshot, assignment):
            found = best.score_of(other)
            if found is not None and (score is None or better(found, score)):
                assignment, score = other, found
        if score == before:
            break
    return assignment


def _neighbours(snapshot: PartitionSnapshot, assignment: dict[int, str]) -> Iterator[dict[int, str]]:
    for stage_id, where in assignment.items():
        for device in snapshot.devices:
            if device.device_id != where:
                yield {**assignment, stage_id: device.device_id}
    for one, other in combinations(assignment, 2):
        if assignment[one] != assignment[other]:
            yield {**assignment, one: assignment[other], other: assignment[one]}


class _Search:
    """Searches depth first, the longest stage first, with a lower bound on the busy time of each device."""

    def __init__(self, best: _Best, max_nodes: int) -> None:
        snapshot = self._snapshot = best.snapshot
        self._best = best
        self._left = max_nodes
        self.stopped = False
        self._stages = sorted(snapshot.stages, key=lambda stage: -stage.seconds)
        self._ids = [device.device_id for device in snapshot.devices]
        self._speeds = [device.speed for device in snapshot.devices]
        self._free = [snapshot.room_of(device, best.headroom) for device in snapshot.devices]
        self._on: list[list[int]] = [[] for _ in snapshot.devices]
        self._busy = [0.0] * len(self._ids)
        self._moved, self._moves = 0.0, 0
        self._assignment: dict[int, str] = {}
        # Least time of the stages from a position on, on a device of speed 1.
        self._least = [stage.seconds * min(1.0, stage.interference) for stage in self._stages]
        self._rest = [sum(self._least[place:]) for place in range(len(self._stages) + 1)]
        # Devices that differ only by name are equivalent; of those that are empty, one is enough to try.
        named = {one for pair in snapshot.distances for one in pair} | set((best.current or {}).values())
        self._kinds = [
            device.device_id if device.device_id in named else (device.memory_bytes, device.speed)
            for device in snapshot.devices
        ]

    def go_on(self, place: int) -> None:
        if place == len(self._stages):
            self._best.offer(dict(self._assignment))
            return
        stage = self._stages[place]
        needs = self._snapshot.bytes_of(stage)
        seen = set()
        for n in range(len(self._ids)):
            if self._free[n] < needs or (not self._on[n] and self._kinds[n] in seen):
                continue
            if not self._on[n]:
                seen.add(self._kinds[n])
            if not self._left:
                self.stopped = True
                return
            self._left -= 1
            before = self._busy[n], self._moved, self._moves
            self._put(place, n)
            if self._can_be_better(place + 1):
                self.go_on(place + 1)
            self._busy[n], self._moved, self._moves = before
            self._on[n].pop()
            self._free[n] += needs
            del self._assignment[stage.stage_id]

    def _put(self, place: int, n: int) -> None:
        stage, device = self._stages[place], self._ids[n]
        self._on[n].append(place)
        self._free[n] -= self._snapshot.bytes_of(stage)
        self._assignment[stage.stage_id] = device
        if len(self._on[n]) == 1:
            self._busy[n] = self._least[place] / self._speeds[n]
        else:
            merged = [self._stages[at] for at in self._on[n]]
            self._busy[n] = sum(one.seconds * one.interference for one in merged) / self._speeds[n]
        for edge in self._snapshot.transfers:
            if stage.stage_id in edge and edge[0] in self._assignment and edge[1] in self._assignment:
                self._moved += self._snapshot.between(edge, self._assignment[edge[0]], self._assignment[edge[1]])
        current = self._best.current
        self._moves += current is not None and current.get(stage.stage_id) != device

    def _can_be_better(self, place: int) -> bool:
        if self._best.score is None:
            return True
        done = sum(busy * speed for busy, speed in zip(self._busy, self._speeds, strict=True))
        evenly = (done + self._rest[place]) / sum(self._speeds)
        latency = sum(self._busy) + self._moved + self._rest[place] / max(self._speeds)
        return better(Score(max(*self._busy, evenly), latency, self._moves), self._best.score)


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
