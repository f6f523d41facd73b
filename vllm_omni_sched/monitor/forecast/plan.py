"""Plan replicas ahead of the load."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.config.errors import ConfigError


class MoveReason(str, Enum):
    """Reason for a pool's planned replicas."""

    HELD = "held"  # enough, and not too many
    AHEAD = "ahead"  # the forecast exceeds the capacity of its replicas
    SPARE = "spare"  # it has needed fewer for long enough
    SHORT = "short"  # it needs more, but none is available
    AT_MAX = "at_max"  # it needs more than its maximum
    GIVES = "gives"  # another pool needs a replica more


@dataclass(frozen=True)
class PoolState:
    """Snapshot of the replicas of a modality or stage, with its forecast.

    ``replicas``: including those that are starting. ``capacity``: arrivals per second that one replica takes.
    ``forecast``: the most arrivals per second within the start-up time of a replica (the upper bound of the forecast).

    Raises:
        ConfigError: not ``0 <= minimum <= maximum``.
        ValueError: replicas or forecast are negative.
    """

    replicas: int
    capacity: float
    forecast: float
    minimum: int = 1
    maximum: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ConfigError(f"need 0 <= minimum <= maximum, got {self.minimum} and {self.maximum}")
        if self.replicas < 0 or not 0 <= self.forecast < math.inf:
            raise ValueError(f"replicas and forecast must be 0 or more, got {self}")


@dataclass(frozen=True)
class PlanOptions:
    """Options of the planner. ``utilisation``: target load of a replica, as a fraction of its capacity.
    ``spare_utilisation``: a replica is given up when the load would stay below that with one fewer for
    ``cooldown_seconds``.

    Raises:
        ConfigError: not ``0 < spare_utilisation < utilisation <= 1``.
    """

    utilisation: float = 0.8
    spare_utilisation: float = 0.6
    cooldown_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.spare_utilisation < self.utilisation <= 1:
            raise ConfigError(
                f"need 0 < spare_utilisation < utilisation <= 1, got {self.spare_utilisation} and {self.utilisation}"
            )


@dataclass(frozen=True)
class PoolPlan:
    """Planned replicas of a pool."""

    replicas: int
    reason: MoveReason


@dataclass(frozen=True)
class Move:
    """Move of replicas from one pool to another; ``None``: from or to the spare ones."""

    source: str | None
    target: str | None
    count: int


class ReplicaPlanner:
    """Moves replicas before the load arrives.

    1. A pool needs enough replicas to keep each at ``utilisation`` under its forecast, within its bounds.
    2. Missing replicas come from the spare ones, then from pools that have more than they need; the pool
       with the highest load is served first. No pool gives replicas that it needs itself.
    3. If no other pool needs it, a pool gives up one replica when it would be below ``spare_utilisation`` with one
       fewer, ``cooldown_seconds`` after that became so and after the last change: replicas are added at once and
       given up slowly.
    """

    def __init__(self, options: PlanOptions | None = None) -> None:
        self.options = options or PlanOptions()
        self._low_since: dict[str, float] = {}

    def plan(
        self, pools: Mapping[str, PoolState], spare: int, now: float
    ) -> tuple[Mapping[str, PoolPlan], tuple[Move, ...]]:
        """Return the plan of each pool, and the moves to get there. The total of pools and spare replicas is conserved.

        Raises:
            ValueError: ``spare`` is negative.
        """
        if spare < 0:
            raise ValueError(f"spare must be 0 or more, got {spare}")
        need = {name: self._need(pool) for name, pool in pools.items()}
        have = {name: pool.replicas for name, pool in pools.items()}
        reasons = dict.fromkeys(pools, MoveReason.HELD)
        moved: dict[tuple[str | None, str | None], int] = {}
        while short := [name for name in pools if have[name] < need[name]]:
            target = max(short, key=lambda name: (_load(pools[name], have[name]), name))
            source: str | None = None
            if spare:
                spare -= 1
            else:
                givers = [name for name in pools if have[name] > need[name]]
                if not givers:
                    break
                source = min(givers, key=lambda name: (_load(pools[name], have[name] - 1), name))
                have[source] -= 1
                reasons[source] = MoveReason.GIVES
            have[target] += 1
            reasons[target] = MoveReason.AHEAD
            moved[source, target] = moved.get((source, target), 0) + 1
        for name, pool in pools.items():
            if have[name] < need[name]:
                reasons[name] = MoveReason.SHORT
            elif _load(pool, pool.maximum) > self.options.utilisation and have[name] >= pool.maximum:
                reasons[name] = MoveReason.AT_MAX
            if self._gives_up(name, pool, have[name], reasons[name], now):
                have[name] -= 1
                reasons[name] = MoveReason.SPARE
                moved[name, None] = 1
        for gone in self._low_since.keys() - pools.keys():
            del self._low_since[gone]
        plans = {name: PoolPlan(have[name], reasons[name]) for name in pools}
        return plans, tuple(Move(source, target, count) for (source, target), count in moved.items())

    def _need(self, pool: PoolState) -> int:
        # A billionth of a replica is rounding.
        needed = math.ceil(pool.forecast / (pool.capacity * self.options.utilisation) - 1e-9)
        return min(max(needed, pool.minimum), pool.maximum)

    def _gives_up(self, name: str, pool: PoolState, have: int, reason: MoveReason, now: float) -> bool:
        low = have > pool.minimum and _load(pool, have - 1) < self.options.spare_utilisation
        if not low or reason is not MoveReason.HELD:
            self._low_since.pop(name, None)
            return False
        if now - self._low_since.setdefault(name, now) < self.options.cooldown_seconds:
            return False
        self._low_since[name] = now
        return True


def _load(pool: PoolState, replicas: int) -> float:
    """Return the utilisation of each replica under the forecast."""
    if replicas <= 0:
        return math.inf if pool.forecast > 0 else 0.0
    return pool.forecast / (replicas * pool.capacity)
