"""The class and targets of each request, from the options and from the request itself (`graph.promises`)."""

import math
from typing import Any

from vllm.v1.request import Request

from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.graph.affinity import AFFINITY_ITEMS
from vllm_omni_sched.graph.order import INTERACTIVE, SlaClass, WaitingRequest
from vllm_omni_sched.graph.promises import promises_of, usual_class
from vllm_omni_sched.monitor.step_times import CostModel


class SlaBook:
    """Keeps the class of each request, and presents requests to the waiting order.

    1. Streaming sessions are realtime, all other requests interactive, unless the request names its class.
    2. The options set the targets; a request may tighten or relax its own.
    3. The front end has checked what clients may ask for; here a request is refused only if it is malformed.
    """

    def __init__(self, config: OmniSchedConfig, costs: CostModel) -> None:
        self.costs = costs
        self._promises = promises_of(config)
        self._classes = self._promises.classes
        self._of: dict[str, SlaClass] = {}
        self._arrivals: dict[str, float] = {}

    def enter(self, request: Request, now: float) -> SlaClass:
        """Record the arrival and the class of a request, and return the class.

        Raises:
            RequestError: its class or its targets are malformed; it was entered as interactive.
        """
        self._arrivals[request.request_id] = now
        self._of[request.request_id] = self._classes[INTERACTIVE.name]
        self._of[request.request_id] = sla = self._classify(request)
        return sla

    def leave(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._of.pop(request_id, None)
        self._arrivals.pop(request_id, None)

    def of(self, request_id: str) -> SlaClass:
        """Return the class of a request; interactive for one that never entered."""
        return self._of.get(request_id) or self._classes[INTERACTIVE.name]

    def deadline(self, request_id: str) -> float:
        """Return when the request's first token is due, in seconds of the clock; ``inf`` without a target."""
        return self._arrivals.get(request_id, math.inf) + self.of(request_id).ttft_seconds

    def waiting(self, request: Request, now: float) -> WaitingRequest:
        """Return the request as the waiting order sees it."""
        features = request.mm_features
        shown = features[:AFFINITY_ITEMS] if features else ()
        cost = self.costs.prefill_seconds(max(0, request.num_tokens - request.num_computed_tokens))
        if features and not request.num_computed_tokens:
            # A session may have very many items: the cost of all is estimated from the first few.
            each = sum(self.costs.encode_seconds(f.modality, f.mm_position.length) for f in shown)
            cost += each * len(features) / len(shown)
        return WaitingRequest(
            request.request_id,
            self._arrivals.get(request.request_id, now),
            self.of(request.request_id),
            cost,
            shown[0].modality if shown else "text",
            frozenset(f.identifier for f in shown),
            request.priority,
            holds_memory=request.num_computed_tokens > 0,
        )

    def _classify(self, request: Request) -> SlaClass:
        extra: dict[str, Any] = getattr(request.sampling_params, "extra_args", None) or {}
        return self._promises.classify(extra, usual_class(self._classes, session=request.resumable))
