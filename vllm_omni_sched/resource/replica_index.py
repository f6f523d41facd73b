"""Which replicas of a large stage are idle, and which have room, without a look at all of them."""

from collections.abc import Iterator

from vllm_omni_sched.resource.balance import Dice, by_lot


class ReplicaIndex:
    """Replicas by how full they are, told of each change.

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
        """A replica has so many requests now, and should have so many at most."""
        group = self._idle if not in_flight else self._open if in_flight < limit else self._full
        before = self._groups.get(replica_id)
        if before is group:
            return
        if before is not None:
            before.remove(replica_id)
        group.add(replica_id)
        self._groups[replica_id] = group

    def with_room(self, dice: Dice) -> Iterator[int]:
        """Those that are idle in random order, then the others that have room."""
        yield from self._idle.drawn(dice)
        yield from self._open.drawn(dice)

    def full(self, dice: Dice) -> Iterator[int]:
        """Those without room, in random order."""
        return self._full.drawn(dice)


class _Group:
    """A set of which members can be drawn."""

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

    def drawn(self, dice: Dice) -> Iterator[int]:
        return (self._members[at] for at in by_lot(len(self._members), dice))
