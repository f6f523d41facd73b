"""Hold the policies and the state that all stages of a pipeline share."""

from __future__ import annotations

from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.config.stage_options import BalancePolicy, StageSchedConfig
from vllm_omni_sched.core.pipeline.requests import PipelineRequest, RequestClasses
from vllm_omni_sched.graph.affinity import AffinityBook
from vllm_omni_sched.graph.order import SlaClass, Undated, WaitingOrder
from vllm_omni_sched.graph.path_order import PathOrder
from vllm_omni_sched.graph.stages import StageGraph
from vllm_omni_sched.resource.pipeline.balance import Balancer, CostBalancer, LeastQueue, RoundRobin
from vllm_omni_sched.resource.pipeline.credits import Credits
from vllm_omni_sched.resource.pipeline.links import HostLinks
from vllm_omni_sched.resource.pipeline.stage_cost import StageCosts

AS_THEY_CAME = WaitingOrder(max_wait_seconds=float("inf"))


class PipelineContext:
    """Costs, classes, order, caches, credits, and hosts of a pipeline.

    With credits, a stage starts only requests that the next stages have room for. Without those of a pipeline in which
    a stage reads chunks, since it starts together with its sources.

    Args:
        config: the options.
        graph: the stages.
        rng: random source.
        together: whether all stages of a request run at once; otherwise it goes from stage to stage.
    """

    def __init__(self, config: StageSchedConfig, graph: StageGraph, rng: Random, together: bool = False) -> None:
        self.config, self.graph, self.rng = config, graph, rng
        self.together = together
        self.branches = graph.branches
        self.costs = StageCosts()
        hosts = config.runtime.hosts
        self.links = HostLinks(hosts.links, hosts.link_bytes_per_second)
        self.standby = frozenset(hosts.standby)
        priority = config.graph.priority
        self.by_class = priority.enabled
        self.classes = RequestClasses(priority)
        self.order = PathOrder(
            graph,
            default=self.classes.default,
            max_wait_seconds=priority.max_wait_seconds,
            undated=Undated(priority.without_deadline),
        )
        self.affinity: dict[int, AffinityBook[int]] = {
            stage.stage_id: AffinityBook() for stage in graph.stages if config.graph.affinity.enabled
        }
        limits = config.runtime.credits
        at_once = together or graph.chunked
        self.credits = _credits(graph, limits.capacity) if limits.enabled and not at_once else None
        self.known: dict[str, PipelineRequest] = {}
        self.mixed = False  # whether requests of several classes or priorities have come
        self._kind: tuple[SlaClass, int] | None = None  # class and priority of the first request
        self.waived: set[str] = set()  # requests that need no credits any more
        self.memory_used = 0.0  # of the host, as a fraction

    def balancer(self) -> Balancer:
        """Return a new balancer, as set in the options."""
        match self.config.balancing.policy:
            case BalancePolicy.COST:
                return CostBalancer(affinity_slack=self.config.balancing.affinity_slack)
            case BalancePolicy.LEAST_QUEUE:
                return LeastQueue()
            case _:
                return RoundRobin()  # like vLLM-Omni for its own replicas

    def waiting_order(self) -> WaitingOrder:
        """Return the order of the queues: by class and slack, or by arrival."""
        return self.order.order if self.by_class else AS_THEY_CAME

    def arrived(self, request: PipelineRequest) -> None:
        """Estimate the costs of a request in all stages where its features are known."""
        self.known[request.request_id] = request
        kind = request.sla, request.priority
        self._kind = self._kind or kind
        self.mixed = self.mixed or kind != self._kind
        for stage_id, features in request.features.items():
            request.costs[stage_id] = self.costs.estimate(str(stage_id), features)

    def left(self, request_id: str) -> None:
        """Forget a request, and free what it held."""
        self.known.pop(request_id, None)
        if self.credits is not None:
            self.credits.give_back(request_id)
            self.waived.discard(request_id)

    # ---- credits

    def credits_needed(self, stage_id: int, request: PipelineRequest) -> tuple[str, ...]:
        """Return the stages that must have a credit for the request to start in a stage."""
        if self.credits is None or request.request_id in self.waived:
            return ()
        return self.credits.needed(str(stage_id), request.request_id, request.path_from(stage_id))

    def take_credits(self, stage_id: int, request: PipelineRequest) -> bool:
        """Take the credits for a request to start in a stage, and return whether it may start."""
        if self.credits is None or request.request_id in self.waived:
            return True
        return self.credits.take(str(stage_id), request.request_id, request.path_from(stage_id))

    def hand_over(self, stage_id: int, request: PipelineRequest, follows: bool) -> None:
        """Record that a request has come to a stage; if it follows another one's work there, it needs no credit."""
        credits, request_id = self.credits, request.request_id
        if credits is None:
            return
        if follows and request.flow is not None and self.branches and request_id not in self.waived:
            credits.skip(str(stage_id), request_id, map(str, request.flow.plan.stages))
        elif follows:
            credits.give_back(request_id, str(stage_id))
        for source in self.graph.stage(stage_id).sources:
            if credits.has_started(request_id, str(source)):
                credits.hand_over(request_id, str(source), str(stage_id))


def _credits(graph: StageGraph, capacity: int) -> Credits:
    successors = {str(one.stage_id): [str(after) for after in graph.successors(one.stage_id)] for one in graph.stages}
    return Credits(successors, dict.fromkeys(successors, capacity))
