"""What each request was promised: from options, and from what the request says itself.

A request may name its class and targets in ``SamplingParams.extra_args`` (``vllm_xargs`` in an OpenAI request)::

    {"omni_class": "batch"}
    {"omni_class": "interactive", "omni_ttft_ms": 800, "omni_itl_ms": 60}
"""

import difflib
import math
from dataclasses import replace
from typing import Any

from vllm.v1.request import Request

from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.errors import RequestError
from vllm_omni_sched.graph.affinity import AFFINITY_ITEMS
from vllm_omni_sched.graph.classes import classes_of
from vllm_omni_sched.graph.order import INTERACTIVE, REALTIME, SlaClass, WaitingRequest
from vllm_omni_sched.monitor.cost import CostModel

_CLASS, _TARGETS = "omni_class", {"omni_ttft_ms": "ttft_seconds", "omni_itl_ms": "itl_seconds"}


class SlaBook:
    """The class of each request, and how the waiting order sees it.

    1. Streaming sessions are realtime, all else is interactive, unless the request names its class.
    2. Targets are the options'; a request may tighten or relax its own.
    """

    def __init__(self, config: OmniSchedConfig, costs: CostModel) -> None:
        self.costs = costs
        self._classes = classes_of(config)
        self._of: dict[str, SlaClass] = {}
        self._arrivals: dict[str, float] = {}

    def enter(self, request: Request, now: float) -> SlaClass:
        """A request arrives.

        Raises:
            RequestError: what it says about its class or its targets makes no sense; it was entered as interactive.
        """
        self._arrivals[request.request_id] = now
        self._of[request.request_id] = self._classes[INTERACTIVE.name]
        self._of[request.request_id] = sla = self._classify(request)
        return sla

    def leave(self, request_id: str) -> None:
        """It is over."""
        self._of.pop(request_id, None)
        self._arrivals.pop(request_id, None)

    def of(self, request_id: str) -> SlaClass:
        """The class of a request; interactive for one that never entered."""
        return self._of.get(request_id) or self._classes[INTERACTIVE.name]

    def deadline(self, request_id: str) -> float:
        """When its first token is due; ``inf`` for no promise."""
        return self._arrivals.get(request_id, math.inf) + self.of(request_id).ttft_seconds

    def waiting(self, request: Request, now: float) -> WaitingRequest:
        """The request as the waiting order sees it."""
        features = request.mm_features
        shown = features[:AFFINITY_ITEMS] if features else ()
        cost = self.costs.prefill_seconds(max(0, request.num_tokens - request.num_computed_tokens))
        if features and not request.num_computed_tokens:
            # Looking at each of a session's items is what this package exists to avoid.
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
        sla = self._classes[REALTIME.name if request.resumable else INTERACTIVE.name]
        if _CLASS in extra:
            name = extra[_CLASS]
            if not isinstance(name, str) or name not in self._classes:
                near = difflib.get_close_matches(str(name), self._classes, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise RequestError(f"{_CLASS} must be one of {', '.join(self._classes)}, got {name!r}{hint}")
            sla = self._classes[name]
        for key, field in _TARGETS.items():
            if key in extra:
                value = extra[key]
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                    raise RequestError(f"{key} must be a number of milliseconds above 0, got {value!r}")
                change: dict[str, Any] = {field: value / 1e3}
                sla = replace(sla, **change)
        return sla
