"""Which replica gets a request where no gate is: the balancers of `vllm_omni_sched.resource.balance`."""

from bisect import bisect_right
from collections.abc import Sequence
from random import Random  # noqa: TID251 (the type of an argument)
from typing import Protocol

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.balance import Balancer, CostBalancer, ReplicaState
from vllm_omni_sched.sim.pools.replica import Replica


class Chooser(Protocol):
    """Picks one of the replicas of a stage.

    ``by_cost``: whether it looks at what requests cost.
    """

    by_cost: bool

    def choose(self, cost_seconds: float, live: Sequence[Replica], now: float) -> Replica:
        """One of ``live``, which are by index and one at least."""


class InTurn:
    """Each replica in turn, by index, in O(log n): what `RoundRobin` picks, without a state for each replica."""

    by_cost = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, cost_seconds: float, live: Sequence[Replica], now: float) -> Replica:
        last = self._last
        at = last + 1  # where it is while no replica has come or gone
        if at >= len(live) or live[at].index != at:
            at = bisect_right(live, last, key=index_of)
            if at == len(live):
                at = 0
        chosen = live[at]
        self._last = chosen.index
        return chosen


def index_of(replica: Replica) -> int:
    """To sort and to search by."""
    return replica.index


class Balanced:
    """What a balancer picks; of all replicas, or of so many that are drawn.

    Args:
        sample: drawn anew for each request, all different: the power of d choices (Mitzenmacher, IEEE TPDS 2001).
            A balancer that draws by itself needs none.

    Raises:
        ConfigError: ``sample`` is below 1.
    """

    def __init__(self, balancer: Balancer, dice: Random, sample: int | None = None) -> None:
        if sample is not None and sample < 1:
            raise ConfigError(f"sample must be 1 or more, got {sample}")
        self.balancer = balancer
        self.by_cost = isinstance(balancer, CostBalancer)
        self._dice, self._sample = dice, sample

    def choose(self, cost_seconds: float, live: Sequence[Replica], now: float) -> Replica:
        if self._sample is not None and self._sample < len(live):
            live = self._dice.sample(live, self._sample)
        picked = self.balancer.pick(cost_seconds, [_state(one, now) for one in live], self._dice).replica_id
        return next(one for one in live if one.index == picked)


def _state(one: Replica, now: float) -> ReplicaState:
    seconds = one.pending_seconds if one.load is None else one.load.remaining_seconds(now)
    return ReplicaState(one.index, max(seconds, 0.0), one.in_flight)
