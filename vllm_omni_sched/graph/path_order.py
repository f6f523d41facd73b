"""Order a stage's queue by the deadline of each request's whole path.

EQF, "equal flexibility": the slack of a request is shared over its remaining stages in proportion to what each
takes (Kao and Garcia-Molina, "Deadline Assignment in a Distributed Soft Real-Time System", IEEE TPDS 1997). A stage
that saw only the deadline of the whole path would let a request wait until no time is left for later stages.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm_omni_sched.graph.order import INTERACTIVE, Placed, SlaClass, Undated, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.stages import StageGraph


@dataclass(frozen=True)
class PathRequest:
    """A request on its way through the stages.

    ``arrival``: arrival time at its first stage; it stays the same all the way, so ageing counts over the path.
    ``costs``: estimated seconds by stage id; the request does not visit a stage that is missing.
    ``sla``: its class; None: the default of `PathOrder`.
    ``deadline_seconds``: from ``arrival`` to its last output; None: the TTFT target of its class.
    ``ready``: arrival time at the stage whose queue it is in now; None: ``arrival``.
    ``priority``, ``affinity`` and ``holds_memory``: as in `WaitingRequest`.

    Raises:
        ValueError: a time or a cost is not a finite number, or negative where it cannot be.
    """

    request_id: str
    arrival: float
    costs: Mapping[int, float] = field(default_factory=dict)
    sla: SlaClass | None = None
    modality: str = "text"
    priority: int = 0
    deadline_seconds: float | None = None
    ready: float | None = None
    affinity: frozenset[str] = frozenset()
    holds_memory: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival) and (self.ready is None or math.isfinite(self.ready))):
            raise ValueError(f"request {self.request_id!r}: arrival and ready must be finite")
        for stage_id, seconds in self.costs.items():
            if not 0 <= seconds < math.inf:
                raise ValueError(f"request {self.request_id!r}: costs[{stage_id}] must be finite and >= 0")
        if self.deadline_seconds is not None and not self.deadline_seconds > 0:
            raise ValueError(f"request {self.request_id!r}: deadline_seconds must be above 0")


def path_request(graph: StageGraph, request: PathRequest, sla: SlaClass, stage_id: int) -> WaitingRequest:
    """Return the request as the queue of one stage sees it.

    1. Its deadline here is its deadline minus the costliest path behind this stage.
    2. It is due here once it has used this stage's part of the slack it had when it came. The slack is the time
       until the deadline minus the costliest path from here on; the part of this stage is
       its cost divided by that path's.
    3. Its arrival is its arrival at the first stage.

    Raises:
        ValueError: there is no such stage.
    """
    cost = request.costs.get(stage_id, 0.0)
    left = graph.longest_path_seconds(request.costs, stage_id)
    promised = sla.ttft_seconds if request.deadline_seconds is None else request.deadline_seconds
    ends = request.arrival + promised
    ready = request.arrival if request.ready is None else request.ready
    slack = ends - ready - left
    return WaitingRequest(
        request.request_id,
        request.arrival,
        sla,
        cost,
        request.modality,
        request.affinity,
        request.priority,
        request.holds_memory,
        deadline=ends - (left - cost),
        # without a cost here, all of the slack is this stage's
        due=ready + slack * (cost / left if left else 1.0) if slack < math.inf else math.inf,
    )


class PathOrder:
    """Orders the queue of any stage of a graph, first to run first.

    1. A request's class is its own, else ``default``.
    2. Its deadline at the stage is derived from that of its path (`path_request`).
    3. `WaitingOrder` decides the rest: memory, ageing, class, user priority, slack, affinity.

    Raises:
        ConfigError: ``max_wait_seconds`` is not above 0.
    """

    def __init__(
        self,
        graph: StageGraph,
        default: SlaClass = INTERACTIVE,
        max_wait_seconds: float = 30.0,
        undated: Undated = Undated.ARRIVAL,
    ) -> None:
        self.graph = graph
        self.default = default
        self.order = WaitingOrder(max_wait_seconds, undated)

    def at_stage(self, request: PathRequest, stage_id: int) -> WaitingRequest:
        """Return the request as the queue of that stage sees it, to be pushed to a `WaitingQueue`.

        Raises:
            ValueError: there is no such stage.
        """
        sla = request.sla or self.default
        return path_request(self.graph, request, sla, stage_id)

    def plan(self, waiting: Iterable[PathRequest], stage_id: int, now: float) -> tuple[Placed, ...]:
        """Return all of ``waiting``, the queue of that stage, first to run first. O(n log n).

        Raises:
            ValueError: there is no such stage.
        """
        return self.order.plan([self.at_stage(request, stage_id) for request in waiting], now)
