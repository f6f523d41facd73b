"""Choose the replica of a request without a gate: the balancers of `vllm_omni_sched.resource.pipeline.balance`."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from random import Random  # noqa: TID251 (the type of an argument)
from typing import Protocol

from vllm_omni_sched.resource.pipeline.balance import Balancer, LazyReplicas
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.sim.pools.replicas import Replica, index_of


class Chooser(Protocol):
    """Picks one of the replicas of a stage."""

    def choose(self, cost_seconds: float, live: Sequence[Replica], now: float) -> Replica:
        """Return one of ``live``, which is sorted by index and not empty."""


class RoundRobinChooser:
    """Picks each replica in turn, by index, in O(log n): like `RoundRobin`, without a state for each replica."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, cost_seconds: float, live: Sequence[Replica], now: float) -> Replica:
        last = self._last
        at = last + 1  # its position while no replica has come or gone
        if at >= len(live) or live[at].index != at:
            at = bisect_right(live, last, key=index_of)
            if at == len(live):
                at = 0
        chosen = live[at]
        self._last = chosen.index
        return chosen


class BalancerChooser:
    """Picks the replica that a balancer picks, describing only those that it compares."""

    def __init__(self, balancer: Balancer, rng: Random) -> None:
        self.balancer = balancer
        self._rng = rng

    def choose(self, cost_seconds: float, live: Sequence[Replica], now: float) -> Replica:
        def state(at: int) -> ReplicaState:
            one = live[at]
            seconds = one.pending_seconds if one.load is None else one.load.remaining_seconds(now)
            return ReplicaState(one.index, seconds if seconds > 0.0 else 0.0, one.in_flight)

        picked = self.balancer.pick(cost_seconds, LazyReplicas(len(live), state), self._rng).replica_id
        assert picked is not None  # there is at least one, and all count as healthy
        if picked < len(live) and live[picked].index == picked:  # its position while no replica has come or gone
            return live[picked]
        return live[bisect_left(live, picked, key=index_of)]
