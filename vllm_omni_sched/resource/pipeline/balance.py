"""Pick the replica of a stage that gets a request."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from operator import attrgetter
from typing import ClassVar, Protocol, overload

from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState

LOOK_AT_ALL = 32
"""Up to this many replicas of a stage, all of them are compared for each request."""

CHOICES = 4
"""Above that, this many replicas are drawn at random and compared."""


class RandomSource(Protocol):
    """The part of ``random.Random`` that a balancer uses."""

    def random(self) -> float:
        """Return the next number in [0, 1)."""


class PickReason(str, Enum):
    """Reason for picking a replica."""

    ONLY = "only"  # no other replica is healthy
    LEAST_WORK = "least_work"  # it would finish the request first
    WARM = "warm"  # it has more of the request in its cache, and finishes it first or hardly later
    NEAR = "near"  # it would finish first only because it is nearer
    TURN = "turn"  # round robin
    SHORTEST_QUEUE = "shortest_queue"  # fewest requests
    NONE_HEALTHY = "none_healthy"  # no pick: every replica is unhealthy, or there is none


@dataclass(frozen=True)
class Pick:
    """The replica, the reason, and the expected seconds until the request is finished there.

    ``replica_id`` is None, and ``finish_seconds`` ``inf``, if no replica is healthy.
    """

    replica_id: int | None
    reason: PickReason
    finish_seconds: float


_id_of, _warm_of, _distance_of = attrgetter("replica_id"), attrgetter("warm"), attrgetter("distance_seconds")
NOBODY = Pick(None, PickReason.NONE_HEALTHY, math.inf)


class Balancer(ABC):
    """Picks one of the healthy replicas for a request.

    1. Up to `LOOK_AT_ALL` replicas, all are compared.
    2. Of more, `CHOICES` are drawn at random with equal probability, and as many from ``near`` are added. An
       unhealthy one is replaced by another draw while there are any. Replicas that are not drawn are not examined, so
       `LazyReplicas` need not describe them: O(1) in the number of replicas.

    Two choices reduce the longest queue of n replicas from about log n / log log n to log log n / log 2; each further
    one gains less (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 2001).
    """

    draws: ClassVar[bool] = True  # rule 2 applies; False: all replicas are compared

    def pick(
        self,
        cost_seconds: float,
        replicas: Sequence[ReplicaState],
        rng: RandomSource,
        near: Iterable[int] = (),
        saved_seconds: Mapping[int, float] | None = None,
    ) -> Pick:
        """Pick the replica for a request of that cost.

        Args:
            near: indices in ``replicas`` of those that have parts of the request in their cache, the warmest first.
            saved_seconds: part of the cost that the cache of a replica saves, by replica id, where not 0; None: not
                known.

        Raises:
            ValueError: the cost or a saving is negative or not finite, or two of the compared replicas have the same
                id.
        """
        if not 0 <= cost_seconds < math.inf:
            raise ValueError(f"cost_seconds must be finite and >= 0, got {cost_seconds}")
        for replica_id, saved in saved_seconds.items() if saved_seconds else ():
            if not 0 <= saved < math.inf:
                raise ValueError(f"replica {replica_id}: saved_seconds must be finite and >= 0, got {saved}")
        seen = _drawn(replicas, rng, near) if self.draws and len(replicas) > LOOK_AT_ALL else list(replicas)
        if len({one.replica_id for one in seen}) < len(seen):
            raise ValueError(f"each replica must have its own id, got {[one.replica_id for one in seen]}")
        healthy = [one for one in seen if one.healthy]
        healthy.sort(key=_id_of)
        if not healthy:
            return NOBODY
        chosen, reason = self._pick(cost_seconds, healthy, rng, saved_seconds)
        if len(healthy) == 1:
            reason = PickReason.ONLY
        return Pick(chosen.replica_id, reason, self.finish_seconds(cost_seconds, chosen, saved_seconds))

    def finish_seconds(
        self, cost_seconds: float, replica: ReplicaState, saved_seconds: Mapping[int, float] | None = None
    ) -> float:
        """Return when the replica would finish the request, in seconds from now, if its cache saves nothing."""
        return (replica.remaining_seconds + cost_seconds) / replica.speed + replica.distance_seconds

    @abstractmethod
    def _pick(
        self,
        cost_seconds: float,
        healthy: Sequence[ReplicaState],
        rng: RandomSource,
        saved_seconds: Mapping[int, float] | None,
    ) -> tuple[ReplicaState, PickReason]: ...


class CostBalancer(Balancer):
    """Picks the replica that finishes the request first: list scheduling by estimated cost.

    1. Expected finish = (remaining work + cost - saving) / speed + distance. The saving is ``saved_seconds`` of the
       replica, and at most the cost. Where that is not known, it is cost x ``saved_share`` x warm.
    2. A warmer replica is picked instead if it finishes later by at most ``affinity_slack`` of the first finish: its
       cached data need not be made and kept twice. Of several, the warmest.
    3. Ties go to the replica with room in its batch, then with fewer requests, then by id; nothing is random.

    With true costs, identical replicas that are all compared, and nothing warm, the last one finishes within (2 - 1/m)
    of the best possible (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).

    Args:
        saved_share: fraction of a request's cost that is saved when all of it is in the cache, in [0, 1], where the
            saving is not known.
        affinity_slack: 0 or more.
    """

    def __init__(self, saved_share: float = 0.5, affinity_slack: float = 0.1) -> None:
        self.saved_share = saved_share
        self.affinity_slack = affinity_slack

    def finish_seconds(
        self, cost_seconds: float, replica: ReplicaState, saved_seconds: Mapping[int, float] | None = None
    ) -> float:
        """Return when the replica would finish the request (rule 1), in seconds from now."""
        if saved_seconds is None:
            cost = cost_seconds * (1 - self.saved_share * replica.warm)
        else:
            cost = max(cost_seconds - saved_seconds.get(replica.replica_id, 0.0), 0.0)
        return (replica.remaining_seconds + cost) / replica.speed + replica.distance_seconds

    def _pick(
        self,
        cost_seconds: float,
        healthy: Sequence[ReplicaState],
        rng: RandomSource,
        saved_seconds: Mapping[int, float] | None,
    ) -> tuple[ReplicaState, PickReason]:
        if len(healthy) == 1:
            return healthy[0], PickReason.ONLY
        finish = [self.finish_seconds(cost_seconds, one, saved_seconds) for one in healthy]
        soonest = min(finish)
        first = healthy[finish.index(soonest)]
        if finish.count(soonest) > 1:
            first = min([one for one, at in zip(healthy, finish, strict=True) if at == soonest], key=_rank_in_tie)
        if any(map(_warm_of, healthy)):
            latest = soonest * (1 + self.affinity_slack)
            near_enough = [
                (-one.warm, at, *_rank_in_tie(one), one)
                for one, at in zip(healthy, finish, strict=True)
                if one.warm > first.warm and at <= latest
            ]
            if near_enough:
                return min(near_enough)[-1], PickReason.WARM
        elif not (saved_seconds or any(map(_distance_of, healthy))):
            return first, PickReason.LEAST_WORK  # nothing else distinguishes them
        return first, self._reason(cost_seconds, first, healthy)

    def _reason(self, cost_seconds: float, first: ReplicaState, healthy: Sequence[ReplicaState]) -> PickReason:
        """Return why ``first`` finishes first: its cache, its distance, or its work."""
        plain = {one.replica_id: super(CostBalancer, self).finish_seconds(cost_seconds, one) for one in healthy}
        best = plain[first.replica_id]
        if min(plain.values()) < best:
            return PickReason.WARM
        there = best - first.distance_seconds
        if any(plain[one.replica_id] - one.distance_seconds < there for one in healthy):
            return PickReason.NEAR
        return PickReason.LEAST_WORK


def _rank_in_tie(one: ReplicaState) -> tuple[bool, int, int]:
    """Return the sort key of replicas that finish a request at the same time (rule 3 of `CostBalancer`)."""
    return one.in_flight >= one.limit, one.in_flight, one.replica_id


class RoundRobin(Balancer):
    """Picks each healthy replica in turn, by id; a baseline for comparison."""

    draws = False

    def __init__(self) -> None:
        self._last: int | None = None

    def _pick(
        self,
        cost_seconds: float,
        healthy: Sequence[ReplicaState],
        rng: RandomSource,
        saved_seconds: Mapping[int, float] | None,
    ) -> tuple[ReplicaState, PickReason]:
        last = self._last
        following = [one for one in healthy if last is not None and one.replica_id > last]
        chosen = (following or healthy)[0]
        self._last = chosen.replica_id
        return chosen, PickReason.TURN


class LeastQueue(Balancer):
    """Picks the replica with the fewest requests, ties by id; a baseline for comparison."""

    def _pick(
        self,
        cost_seconds: float,
        healthy: Sequence[ReplicaState],
        rng: RandomSource,
        saved_seconds: Mapping[int, float] | None,
    ) -> tuple[ReplicaState, PickReason]:
        return min(healthy, key=lambda one: (one.in_flight, one.replica_id)), PickReason.SHORTEST_QUEUE


class LazyReplicas(Sequence[ReplicaState]):
    """A sequence of ``count`` replicas, each described only when it is accessed.

    ``described``: returns the replica at an index that is not negative.
    """

    def __init__(self, count: int, describe: Callable[[int], ReplicaState]) -> None:
        self._indices, self.described = range(count), describe

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[ReplicaState]:
        return map(self.described, self._indices)

    @overload
    def __getitem__(self, index: int) -> ReplicaState: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReplicaState]: ...
    def __getitem__(self, index: int | slice) -> ReplicaState | list[ReplicaState]:
        if isinstance(index, slice):
            return [self.described(one) for one in self._indices[index]]
        return self.described(self._indices[index])


def by_lot(count: int, rng: RandomSource) -> Iterator[int]:
    """Yield range(count) in random order (Fisher and Yates), storing only the entries that were swapped."""
    moved: dict[int, int] = {}
    for first in range(count):
        at = first + int(rng.random() * (count - first))
        yield moved.get(at, at)
        moved[at] = moved.get(first, first)


def _drawn(replicas: Sequence[ReplicaState], rng: RandomSource, near: Iterable[int]) -> list[ReplicaState]:
    """Return the healthy replicas to compare, by rule 2 of `Balancer`."""
    describe = replicas.described if isinstance(replicas, LazyReplicas) else replicas.__getitem__
    found = {at: one for at in islice(near, CHOICES) if (one := describe(at)).healthy}
    most = CHOICES + len(found)
    for at in by_lot(len(replicas), rng):
        if at not in found and (one := describe(at)).healthy:
            found[at] = one
            if len(found) == most:
                break
    return list(found.values())


class ReplicaIndex:
    """The replicas of a stage by how full they are, updated on each change.

    O(1) for a change, and for each replica that is drawn.
    """

    def __init__(self) -> None:
        self._idle, self._open, self._full = _Group(), _Group(), _Group()
        self._groups: dict[int, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._groups

    def put(self, replica_id: int, in_flight: int, limit: int) -> None:
        """Set how many requests a replica has, and how many it should have at most."""
        group = self._idle if not in_flight else self._open if in_flight < limit else self._full
        before = self._groups.get(replica_id)
        if before is group:
            return
        if before is not None:
            before.remove(replica_id)
        group.add(replica_id)
        self._groups[replica_id] = group

    def remove(self, replica_id: int) -> None:
        """Remove a replica that is gone or gets no requests; unknown replicas are ignored."""
        group = self._groups.pop(replica_id, None)
        if group is not None:
            group.remove(replica_id)

    def with_room(self, rng: RandomSource) -> Iterator[int]:
        """Yield the idle replicas in random order, then the others that have room."""
        yield from self._idle.drawn(rng)
        yield from self._open.drawn(rng)

    def full(self, rng: RandomSource) -> Iterator[int]:
        """Yield the replicas without room, in random order."""
        return self._full.drawn(rng)


def draws(replicas: int, balancer: Balancer) -> bool:
    """Return whether, with that many replicas, a few are drawn for each request instead of comparing all."""
    return replicas > LOOK_AT_ALL and balancer.draws


def drawn(
    index: ReplicaIndex, describe: Callable[[int], ReplicaState | None], rng: RandomSource, even_full: bool = False
) -> list[ReplicaState]:
    """Return `CHOICES` replicas with room, idle ones first; if there are none, full ones that are about to have room.

    Args:
        index: index of the stage's replicas.
        describe: returns the state of a replica; None for one that should get nothing and is replaced by another.
        rng: random source.
        even_full: also return full replicas that are not about to have room.
    """
    found = list(islice((one for one in _described(index.with_room(rng), describe) if one.room), CHOICES))
    if found:
        return found
    full = islice(_described(index.full(rng), describe), CHOICES)
    return [one for one in full if one.room or even_full]


def _described(replica_ids: Iterator[int], describe: Callable[[int], ReplicaState | None]) -> Iterator[ReplicaState]:
    return (one for replica_id in replica_ids if (one := describe(replica_id)) is not None)


class _Group:
    """A set whose members can be drawn at random."""

    def __init__(self) -> None:
        self._members: list[int] = []
        self._places: dict[int, int] = {}

    def add(self, member: int) -> None:
        self._places[member] = len(self._members)
        self._members.append(member)

    def remove(self, member: int) -> None:
        place, last = self._places.pop(member), self._members.pop()
        if last != member:
            self._members[place] = last
            self._places[last] = place

    def drawn(self, rng: RandomSource) -> Iterator[int]:
        return (self._members[at] for at in by_lot(len(self._members), rng))
