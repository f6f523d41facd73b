"""Track the room on the replicas of a stage during one decision."""

import math
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest

from vllm_omni_sched.resource.balance import CHOICES, LOOK_AT_ALL, Balancer, Dice, ReplicaState

NO_ROOM = -1.0  # below 0 units: not even short work fits


class GateRoom:
    """The healthy replicas, including the work that this decision places on them.

    ``units``: the longest request that can be placed; ``idle_units``: the longest on an idle replica. `NO_ROOM` if not
    even a short one fits. Replicas that were idle at first stay so: requests released together start together.
    """

    def __init__(self, replicas: Sequence[ReplicaState] = ()) -> None:
        self._open = {one.replica_id: one for one in replicas if one.healthy and one.in_flight < one.limit}
        self._idle = {name for name, one in self._open.items() if one.in_flight == 0}
        self._measured: tuple[float, float] | None = None

    @property
    def units(self) -> float:
        return self._measure()[0]

    @property
    def idle_units(self) -> float:
        return self._measure()[1]

    def has_room(self) -> bool:
        return bool(self._open)

    def least_room(self, units: int) -> int:
        """Return the fewest free places in the batch of a replica that takes so many units; there must be one."""
        return min(one.room for one in self._open.values() if one.takes(units))

    def _measure(self) -> tuple[float, float]:
        if self._measured is None:
            spare = {name: _spare(one) for name, one in self._open.items()}
            idle = [units for name, units in spare.items() if name in self._idle]
            self._measured = max(spare.values(), default=NO_ROOM), max(idle, default=NO_ROOM)
        return self._measured

    def place(
        self,
        cost_seconds: float,
        units: int,
        near: tuple[Mapping[int, float], Mapping[int, float]],
        balancer: Balancer,
        rng: Dice,
        to_fill: bool = False,
        other: Callable[[int], ReplicaState | None] = lambda _: None,
    ) -> int:
        """Place a request on a replica with room, or with ``to_fill`` on one with the least; there must be one.

        Args:
            near: warm fractions and distances, by replica.
            other: describes a replica that is missing here; the warmest of these are compared, too.
        """
        warm, distances = near
        if warm and not to_fill:
            self._fetch(warm, units, other)
        most = self.least_room(units) if to_fill else math.inf
        choices = [one for one in self._open.values() if one.room <= most and one.takes(units)]
        if warm or distances:
            choices = [_near(one, warm, distances) for one in choices]
        best = _warmest(choices) if warm and len(choices) > LOOK_AT_ALL else ()
        chosen = balancer.pick(cost_seconds, choices, rng, best).replica_id
        assert chosen is not None  # all of them are healthy
        one = self._open[chosen].with_work(cost_seconds, units)
        if one.room:
            self._open[chosen] = one
        else:
            del self._open[chosen]
        self._measured = None
        return chosen

    def _fetch(self, warm: Mapping[int, float], units: int, other: Callable[[int], ReplicaState | None]) -> None:
        """Add the warmest missing replicas that take so many units."""
        away = [name for name, part in warm.items() if part and name not in self._open]
        for name in nlargest(CHOICES, away, key=warm.__getitem__):
            one = other(name)
            if one is not None and one.healthy and one.takes(units):
                self._open[name] = one


def _warmest(replicas: Sequence[ReplicaState]) -> list[int]:
    """Return the indices of the replicas with the largest warm fractions."""
    return nlargest(CHOICES, (at for at, one in enumerate(replicas) if one.warm), key=lambda at: replicas[at].warm)


def _near(replica: ReplicaState, warm: Mapping[int, float], distances: Mapping[int, float]) -> ReplicaState:
    """Return the replica as this request sees it. ``dataclasses.replace`` would be slower."""
    name = replica.replica_id
    if name not in warm and name not in distances:
        return replica
    return ReplicaState(
        name,
        replica.remaining_seconds,
        replica.in_flight,
        replica.limit,
        replica.speed,
        distances.get(name, replica.distance_seconds),
        warm.get(name, replica.warm),
        replica.healthy,
        replica.units,
        replica.units_limit,
    )


def _spare(replica: ReplicaState) -> float:
    """Return the units of the largest request that the replica takes; it must have room in its batch."""
    if not replica.units or replica.units_limit is None:
        return math.inf
    return max(replica.units_limit - replica.units, 0)
