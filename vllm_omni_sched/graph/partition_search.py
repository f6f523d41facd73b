"""Find the best assignment of stages to devices.

Branch and bound, started from the result of a heuristic. The heuristic is LPT (longest processing time first; on
devices of different speed Gonzalez, Ibarra and Sahni, "Bounds for LPT Schedules on Uniform Processors", SIAM J.
Comput. 1977), improved by moving and swapping stages. Memory makes even finding any assignment a bin-packing problem,
so the heuristic tries stages by size as well, and the search continues where it found none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from vllm_omni_sched.graph.partition_model import PartitionSnapshot, Score, better


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
    """The best assignment so far."""

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
