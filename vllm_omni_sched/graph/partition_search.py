"""Find the best assignment of stages to devices by branch and bound, started from the results of a heuristic.

The heuristic is LPT (longest processing time first; on devices of different speed Gonzalez, Ibarra and Sahni, "Bounds
for LPT Schedules on Uniform Processors", SIAM J. Comput. 1977), improved by moving and swapping stages. Memory makes
even finding any assignment a bin-packing problem, so the heuristic tries stages by size as well, and the search
continues where it found none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from vllm_omni_sched.graph.partition_model import Assignment, PartitionSnapshot, Score, better


@dataclass(frozen=True)
class Found:
    """Best assignment found, None if none fits; ``proven``: there is no better one, or none at all."""

    assignment: Assignment | None
    proven: bool


def best_partition(
    snapshot: PartitionSnapshot,
    current: Assignment | None = None,
    headroom: float = 0.0,
    max_nodes: int = 50_000,
) -> Found:
    """Return the assignment with the highest throughput, compared with `better`.

    1. The search starts from the results of the heuristic, and from ``current`` if it fits: the result is never worse.
    2. The search examines up to ``max_nodes`` partial assignments and prunes those that cannot become
       better than the best so far. If it completes, the result is proven best.
    3. Where memory is ample, transfers and moves cost nothing, no stage may be split, and every interference is between
       1 and f, the busiest of m devices takes, even with ``max_nodes`` 0, at most f * 2m / (m + 1) times the seconds
       of the best assignment's.
    """
    best = _Best(snapshot, current, headroom)
    if current is not None and snapshot.covers(current):
        best.offer(dict(current))
    splits = any(len(stage.efficiency) > 1 for stage in snapshot.stages)
    for by_load, split in ((True, False), (False, False), *(((True, True), (False, True)) if splits else ())):
        start = greedy(snapshot, headroom, by_load, split)
        if not isinstance(start, Shortage):
            best.offer(_improved(best, start))
    search = _Search(best, max_nodes)
    search.go_on(0)
    return Found(best.assignment, not search.stopped)


@dataclass(frozen=True)
class Shortage:
    """A stage that fits in no place, and how many bytes a device lacks in the place that lacks the least."""

    stage_id: int
    missing_bytes: int


def greedy(
    snapshot: PartitionSnapshot, headroom: float, by_load: bool, split: bool = True
) -> dict[int, str] | Shortage:
    """Assign each stage in turn to the place that finishes it first, the longest first (LPT); or, if not ``by_load``,
    to the place with the least room left, the largest first (best fit decreasing).

    Args:
        split: try places of all sizes; if False, only those of the smallest size that the stage may have.
    """
    done = [0.0] * len(snapshot.devices)
    free = [snapshot.room_of(device, headroom) for device in snapshot.devices]
    found = {}
    for stage in sorted(snapshot.stages, key=lambda one: -one.seconds if by_load else -snapshot.bytes_of(one)):
        least = min(stage.efficiency)
        choices, lacks = [], []
        for order, (place, group) in enumerate(snapshot.places[stage.stage_id].items()):
            if not split and len(group) > least:
                continue
            room = min(free[n] for n in group)
            lacking = snapshot.bytes_of(stage, len(group)) - room
            lacks.append(lacking)
            if lacking <= 0:
                end = max(done[n] for n in group) + snapshot.seconds_on(stage, group)
                choices.append((end if by_load else room, end, len(group), order, place))
        if not choices:
            return Shortage(stage.stage_id, min(lacks, default=snapshot.bytes_of(stage, least)))
        _, end, _, _, place = min(choices)
        group = snapshot.places[stage.stage_id][place]
        for n in group:
            free[n] -= snapshot.bytes_of(stage, len(group))
            done[n] = end
        found[stage.stage_id] = place
    return found


class _Best:
    """Keeps the best assignment so far."""

    def __init__(self, snapshot: PartitionSnapshot, current: Assignment | None, headroom: float) -> None:
        self.snapshot = snapshot
        self.current = current
        self.headroom = headroom
        self.assignment: dict[int, str] | None = None
        self.score: Score | None = None

    def score_of(self, assignment: Assignment) -> Score | None:
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
        for place in snapshot.places[stage_id]:
            if place != where:
                yield {**assignment, stage_id: place}
    for one, other in combinations(assignment, 2):
        mine, theirs = assignment[one], assignment[other]
        if mine != theirs and theirs in snapshot.places[one] and mine in snapshot.places[other]:
            yield {**assignment, one: theirs, other: mine}


class _Search:
    """Searches depth first, the longest stage first, with a lower bound on the busy time of each device and link."""

    def __init__(self, best: _Best, max_nodes: int) -> None:
        snapshot = self._snapshot = best.snapshot
        self._best = best
        self._left = max_nodes
        self.stopped = False
        self._stages = sorted(snapshot.stages, key=lambda stage: -stage.seconds)
        self._speeds = [device.speed for device in snapshot.devices]
        self._free = [snapshot.room_of(device, best.headroom) for device in snapshot.devices]
        self._on: list[list[int]] = [[] for _ in snapshot.devices]
        self._groups: list[tuple[int, ...]] = []  # of the stages that have a place
        self._assignment: dict[int, str] = {}
        # Least device seconds, and least latency, of the stages from a position on.
        least = [stage.seconds * min(1.0, stage.interference) for stage in self._stages]
        work = [one / max(stage.efficiency.values()) for one, stage in zip(least, self._stages, strict=True)]
        soonest = [
            one / (max(map(stage.speedup, stage.efficiency)) * max(self._speeds))
            for one, stage in zip(least, self._stages, strict=True)
        ]
        positions = range(len(self._stages) + 1)
        self._rest = [sum(work[place:]) for place in positions]
        self._soonest = [sum(soonest[place:]) for place in positions]
        # Devices that differ only by name are equivalent, unless a stage may be split; of those that are empty, one is
        # enough to try.
        named = {one for pair in snapshot.links.speeds for one in pair}
        named |= {one for where in (best.current or {}).values() for one in where.split(",")}
        alike = all(set(stage.efficiency) == {1} for stage in snapshot.stages)
        self._kinds = [
            (device.memory_bytes, device.speed) if alike and device.device_id not in named else device.device_id
            for device in snapshot.devices
        ]

    def go_on(self, place: int) -> None:
        if place == len(self._stages):
            self._best.offer(dict(self._assignment))
            return
        stage = self._stages[place]
        seen = set()
        for name, group in self._snapshot.places[stage.stage_id].items():
            needs = self._snapshot.bytes_of(stage, len(group))
            if any(self._free[n] < needs for n in group):
                continue
            if not any(self._on[n] for n in group):
                kinds = tuple(self._kinds[n] for n in group)
                if kinds in seen:
                    continue
                seen.add(kinds)
            if not self._left:
                self.stopped = True
                return
            self._left -= 1
            self._assignment[stage.stage_id] = name
            self._groups.append(group)
            for n in group:
                self._on[n].append(place)
                self._free[n] -= needs
            if self._can_be_better(place + 1):
                self.go_on(place + 1)
            for n in group:
                self._on[n].pop()
                self._free[n] += needs
            self._groups.pop()
            del self._assignment[stage.stage_id]

    def _can_be_better(self, place: int) -> bool:
        """Return whether the first ``place`` stages, as they are placed, may be part of something better."""
        if self._best.score is None:
            return True
        snapshot, current = self._snapshot, self._best.current
        busy, latency, moves, share = [0.0] * len(self._on), self._soonest[place], 0, 0.0
        for stage, group in zip(self._stages, self._groups, strict=False):
            merged = any(len(self._on[n]) > 1 for n in group)
            factor = stage.interference if merged else min(1.0, stage.interference)
            seconds = snapshot.seconds_on(stage, group) * factor
            latency += seconds
            for n in group:
                busy[n] += seconds
            if current is not None and current.get(stage.stage_id) != self._assignment[stage.stage_id]:
                moves += 1
                share += snapshot.loading_share(stage)
        on_link: dict[tuple[str, str], float] = {}
        for (source, target), nbytes in snapshot.payload_bytes.items():
            if source in self._assignment and target in self._assignment:
                link, speed = snapshot.link(self._assignment[source], self._assignment[target])
                if link is not None:
                    on_link[link] = on_link.get(link, 0.0) + nbytes / speed
                    latency += nbytes / speed
        done = sum(one * speed for one, speed in zip(busy, self._speeds, strict=True))
        evenly = (done + self._rest[place]) / sum(self._speeds)
        busiest = max(*busy, *on_link.values(), evenly)
        return better(Score(busiest, latency, moves, share), self._best.score)
