"""vLLM's waiting queues in the order of `graph.WaitingQueue`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_omni_sched import compat
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.history import Transition
from vllm_omni_sched.core.engine.requests import PromptItem
from vllm_omni_sched.graph.affinity import AFFINITY_ITEMS
from vllm_omni_sched.graph.order import Placed, WaitingOrder
from vllm_omni_sched.graph.waiting_queue import WaitingQueue


class SlaRequestQueue(RequestQueue):
    """A queue for ``Scheduler.waiting`` whose first request the policy chooses.

    1. Time stands still during a step (`now` is the step's), so that the request that was seen is the one popped.
    2. Prepending is the same as adding, as in vLLM's priority queue: a request that was preempted or held back keeps
       its arrival time, and thus its place.
    """

    def __init__(self, core: EngineCore, order: WaitingOrder, now: Callable[[], float]) -> None:
        self._queue = WaitingQueue(order)
        self._core = core
        self._now = now
        self._requests: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        now = self._now()
        self._requests[request.request_id] = request
        computed, features = request.num_computed_tokens, request.mm_features or ()
        items = [
            PromptItem(one.identifier, one.modality, one.mm_position.length, one.mm_position.offset)
            for one in features[:AFFINITY_ITEMS]
        ]
        waiting = self._core.waiting_request(
            request.request_id, computed, request.num_tokens - computed, items, len(features), now, request.priority
        )
        self._queue.push(waiting, now)

    def head(self) -> Placed | None:
        """Return the first request as the policy sees it, and the reason for its place."""
        return self._queue.peek(self._now())

    def peek_request(self) -> Request:
        head = self.head()
        if head is None:
            raise IndexError("peek from an empty queue")
        return self._requests[head.request.request_id]

    def pop_request(self) -> Request:
        head = self._queue.pop(self._now())
        if head is None:
            raise IndexError("pop from an empty queue")
        self._core.metrics.admitted[head.reason.value] += 1
        self._core.note(Transition.TAKEN, head.request.request_id, self._now(), head.reason.value)
        return self._requests.pop(head.request.request_id)

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:  # type: ignore[override]
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._queue.remove(request.request_id)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in set(requests):
            if request.request_id in self._requests:
                self.remove_request(request)

    def __contains__(self, request: Any) -> bool:
        return getattr(request, "request_id", None) in self._requests

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[one.request_id] for one in self._queue.ordered(self._now()))


class WaitingOrderMixin:
    """Makes a scheduler take the waiting requests in our order. Without `omni_order_by` nothing changes."""

    _omni_order: WaitingOrder | None = None
    _omni_step_time = 0.0

    def omni_order_by(self, core: EngineCore) -> None:
        """Replace vLLM's waiting queues, which must still be empty, by ours."""
        self._omni_order = order = core.order
        assert order is not None
        for name in compat.waiting_queues(self):
            setattr(self, name, SlaRequestQueue(core, order, lambda: self._omni_step_time))

    def _select_waiting_queue_for_scheduling(self) -> Any:
        """Return the queue with the better head; vLLM before 0.32 keeps skipped requests in a second queue."""
        if self._omni_order is None:
            return super()._select_waiting_queue_for_scheduling()  # type: ignore[misc]
        order, now = self._omni_order, self._omni_step_time
        ours = [queue for name in compat.waiting_queues(self) if (queue := getattr(self, name))]
        return min(ours, key=lambda queue: order.key(queue.head().request, now), default=None)
