"""Build what the stages of an orchestrated pipeline share, from the options as in vLLM-Omni."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.graph.order import BATCH, SlaClass, Undated, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.path_order import PathOrder, PathRequest
from vllm_omni_sched.graph.placement import AffinityBook
from vllm_omni_sched.graph.stages import Stage, StageGraph
from vllm_omni_sched.monitor.recovery.chosen import recovery_options
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.resource.balance import Balancer, CostBalancer, LeastQueue, RoundRobin
from vllm_omni_sched.resource.credits import Credits
from vllm_omni_sched.resource.stage_cost import StageCosts
from vllm_omni_sched.sim.pools.features import features_of, keys_of
from vllm_omni_sched.sim.pools.spec import StageSpec
from vllm_omni_sched.sim.pools.trip import Trip
from vllm_omni_sched.stage_options import BalancePolicy, StageSchedConfig
from vllm_omni_sched.stage_options.graph import ClassTargets


def graph_of(specs: Sequence[StageSpec], paths: Sequence[tuple[int, ...]]) -> StageGraph:
    """Return the stages as a graph with an edge for each step of a path.

    Raises:
        GraphError: no path goes through a stage.
    """
    sources: dict[int, dict[int, None]] = {stage: {} for stage in range(len(specs))}
    for path in paths:
        for before, after in pairwise(path):
            sources[after][before] = None
    finals = {path[-1] for path in paths}
    stages = [
        Stage(number, spec.name, spec.kind, tuple(sources[number]), number in finals, replicas=spec.replicas)
        for number, spec in enumerate(specs)
    ]
    return StageGraph.of(stages, {path[0] for path in paths})


class Policies:
    """The real costs, order, credits, affinity, and classes of requests.

    Args:
        config: the options.
        specs: the stages, by number.
        paths: all paths of requests through the stages.
        dice: random source.
    """

    def __init__(
        self,
        config: StageSchedConfig,
        specs: Sequence[StageSpec],
        paths: Sequence[tuple[int, ...]],
        dice: Random,
    ) -> None:
        self.config, self.dice = config, dice
        self.graph = graph_of(specs, paths)
        self.costs = StageCosts()
        priority = config.graph.priority
        self._by_class = priority.enabled
        self._waited = 0  # how often requests began to wait
        self._classes = {
            name: SlaClass(name, _seconds(each), math.inf, each.rank) for name, each in priority.classes.items()
        }
        self._default = self._classes[priority.default_class]
        self._by_modality = {modality: self._classes[name] for modality, name in priority.by_modality.items()}
        ranks = {each.rank for each in self._classes.values()}
        self._lowest = max(ranks) if len(ranks) > 1 else math.inf
        self.order = PathOrder(
            self.graph,
            default=self._default,
            max_wait_seconds=priority.max_wait_seconds,
            undated=Undated(priority.without_deadline),
        )
        follows = config.graph.affinity
        self.affinity = [AffinityBook[int](follows.capacity) if follows.enabled else None for _ in specs]
        self.credits = self._credits(specs) if config.runtime.credits.enabled else None

    def _credits(self, specs: Sequence[StageSpec]) -> Credits:
        successors = {str(stage): [str(one) for one in self.graph.successors(stage)] for stage in range(len(specs))}
        return Credits(successors, dict.fromkeys(successors, self.config.runtime.credits.capacity))

    def recovery(self, specs: Sequence[StageSpec]) -> Recovery | None:
        """What repairs dead replicas, if anything is to. What a stage has made for a request is kept until that leaves,
        so no earlier stage runs again."""
        options = self.config.runtime.recovery
        if not options.enabled:
            return None
        return Recovery(
            {Replica(stage, index): math.inf for stage, spec in enumerate(specs) for index in range(spec.replicas)},
            {},
            recovery_options(options),
            self.dice,
        )

    def balancer(self) -> Balancer:
        """Return a new balancer, as set in the options."""
        match self.config.balancing.policy:
            case BalancePolicy.COST:
                return CostBalancer(affinity_slack=self.config.balancing.affinity_slack)
            case BalancePolicy.LEAST_QUEUE:
                return LeastQueue()
            case _:
                return RoundRobin()

    def sla_of(self, trip: Trip) -> SlaClass:
        """Return the class that a request names if it exists, else that of its modality."""
        request = trip.request
        return self._classes.get(request.sla) or self._by_modality.get(request.modality, self._default)

    def is_low(self, trip: Trip) -> bool:
        """Return whether it is in the class that gets only its share while others wait."""
        return self.sla_of(trip).rank >= self._lowest

    def arrived(self, trip: Trip) -> None:
        """Estimate the cost of a request that has arrived in each stage."""
        trip.keys = keys_of(trip.request)
        for stage in trip.path:
            features = trip.features[stage] = features_of(trip.request, self.graph.stage(stage).kind)
            trip.costs[stage] = self.costs.estimate(str(stage), features)

    def waiting_order(self) -> WaitingOrder:
        """Return the order of the queues: by class and slack, or by arrival."""
        return self.order.order if self._by_class else WaitingOrder(math.inf)

    def queued(self, trip: Trip, stage: int, now: float) -> WaitingRequest:
        """Return the request as the queue of a stage sees it from now on."""
        if not self._by_class:
            self._waited += 1
            return WaitingRequest(trip.name, self._waited, BATCH, trip.costs[stage])
        request = trip.request
        costs: Mapping[int, float] = dict(trip.costs)
        path_request = PathRequest(
            trip.name,
            request.arrival,
            costs,
            self.sla_of(trip),
            request.modality,
            ready=now,
            affinity=trip.keys,
        )
        return self.order.at_stage(path_request, stage)


def _seconds(targets: ClassTargets) -> float:
    """Return the seconds from the arrival of a request to its deadline on the whole path."""
    given = targets.ttft_ms if targets.e2e_ms is None else targets.e2e_ms
    return math.inf if given is None else given / 1e3
