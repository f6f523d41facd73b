"""Index the replicas of a large stage by idle, with room and full, to draw from them without a scan."""

from collections.abc import Callable, Iterator
from itertools import islice

from vllm_omni_sched.resource.balance import CHOICES, LOOK_AT_ALL, Balancer, Dice, ReplicaState, by_lot


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

    def with_room(self, rng: Dice) -> Iterator[int]:
        """Yield the idle replicas in random order, then the others that have room."""
        yield from self._idle.drawn(rng)
        yield from self._open.drawn(rng)

    def full(self, rng: Dice) -> Iterator[int]:
        """Yield the replicas without room, in random order."""
        return self._full.drawn(rng)


def draws(replicas: int, balancer: Balancer) -> bool:
    """Return whether, with that many replicas, a few are drawn for each request instead of comparing all."""
    return replicas > LOOK_AT_ALL and balancer.draws


def drawn(
    index: ReplicaIndex, describe: Callable[[int], ReplicaState | None], rng: Dice, even_full: bool = False
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

    def drawn(self, rng: Dice) -> Iterator[int]:
        return (self._members[at] for at in by_lot(len(self._members), rng))
