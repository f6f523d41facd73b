"""Describe a replica of a stage to a balancer."""

import math
from typing import NamedTuple

_INF = math.inf
_new_tuple = tuple.__new__


class _ReplicaFields(NamedTuple):
    replica_id: int
    remaining_seconds: float
    in_flight: int
    limit: int
    speed: float
    distance_seconds: float
    warm: float
    healthy: bool
    units: int
    units_limit: int | None


class ReplicaState(_ReplicaFields):
    """State of a replica as a balancer sees it; a tuple, since many are made.

    ``remaining_seconds``: estimated time of its unfinished work at speed 1.
    ``in_flight``: its requests, queued and running; ``limit``: most requests that it should have.
    ``speed``: its speed relative to the device for which costs are estimated.
    ``distance_seconds``: time to transfer the request's input there.
    ``warm``: the fraction of the request that is in its cache, in [0, 1].
    ``units``: units of long work that it runs; ``units_limit``: most units that it should run.

    Raises:
        ValueError: a number is out of its range or not finite.
    """

    __slots__ = ()

    def __new__(
        cls,
        replica_id: int,
        remaining_seconds: float = 0.0,
        in_flight: int = 0,
        limit: int = 32,
        speed: float = 1.0,
        distance_seconds: float = 0.0,
        warm: float = 0.0,
        healthy: bool = True,
        units: int = 0,
        units_limit: int | None = None,  # no limit
    ) -> "ReplicaState":
        if not (  # one condition, since many are made
            0 <= remaining_seconds < _INF
            and 0 <= in_flight < _INF
            and 0 <= limit < _INF
            and 0 <= distance_seconds < _INF
            and 0 <= units < _INF
            and 0 < speed < _INF
            and 0 <= warm <= 1
        ):
            for name, value in (
                ("remaining_seconds", remaining_seconds),
                ("in_flight", in_flight),
                ("limit", limit),
                ("distance_seconds", distance_seconds),
                ("units", units),
            ):
                if not 0 <= value < _INF:
                    raise ValueError(f"replica {replica_id}: {name} must be finite and >= 0, got {value}")
            if not 0 < speed < _INF:
                raise ValueError(f"replica {replica_id}: speed must be above 0, got {speed}")
            raise ValueError(f"replica {replica_id}: warm must be in [0, 1], got {warm}")
        return _new_tuple(
            cls,
            (
                replica_id,
                remaining_seconds,
                in_flight,
                limit,
                speed,
                distance_seconds,
                warm,
                healthy,
                units,
                units_limit,
            ),
        )

    @property
    def room(self) -> int:
        """Return how many more requests it should be given."""
        return self.limit - self.in_flight if self.limit > self.in_flight else 0

    def with_work(self, cost_seconds: float, units: int = 0) -> "ReplicaState":
        """Return the state with one more request."""
        return ReplicaState(
            self.replica_id,
            self.remaining_seconds + cost_seconds,
            self.in_flight + 1,
            self.limit,
            self.speed,
            self.distance_seconds,
            self.warm,
            self.healthy,
            self.units + units,
            self.units_limit,
        )

    def takes(self, units: int) -> bool:
        """Return whether it should get a request of that many units now; one larger than the limit runs alone."""
        if self.in_flight >= self.limit:
            return False
        return not units or not self.units or self.units_limit is None or self.units + units <= self.units_limit
