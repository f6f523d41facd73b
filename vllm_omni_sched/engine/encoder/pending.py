"""Encoder inputs whose data runner V2 still holds, as an index range (vLLM 0.33+).

vLLM keeps them as a set, which it fills by walking all items of every (re)installed request and searches whole in every
step: O(pending x encoding). Items are consumed in order, so a range and a few exceptions hold the same information.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from vllm_omni_sched.engine.protocols import Request, Scheduler
from vllm_omni_sched.items import FeatureList, in_order, num_covered
from vllm_omni_sched.items.feature_list import Strip

Updates = dict[str, dict[int, Any]]
"""Request id -> item -> its data, to be sent again, or None to drop it."""


class HeldInputs:
    """The items ``[low, high)`` of a sequential list, and the few below ``low`` that were sent again.

    A step looks only at the items that it encodes and at those that leave.

    Args:
        low, high: range of the items that a worker was just sent with their data.
    """

    __slots__ = ("_behind_in_order", "behind", "high", "low")

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high
        self.behind: set[int] = set()
        self._behind_in_order: list[int] = []  # the same items as a heap

    def __contains__(self, item: int) -> bool:
        return self.low <= item < self.high or item in self.behind

    def missing(self, items: Iterable[int]) -> list[int]:
        """Return those of ``items`` that the worker does not hold."""
        low, high, behind = self.low, self.high, self.behind
        return [i for i in items if not (low <= i < high or i in behind)]

    def give_back(self, item: int) -> None:
        """Record that the worker is sent this item again."""
        if item not in self.behind:
            self.behind.add(item)
            heappush(self._behind_in_order, item)

    def release(self, features: list[Any], num_computed_tokens: int, in_use: Iterable[int]) -> list[int]:
        """Return the ids that the worker may drop now, each once; items ``in_use`` stay.

        ``num_computed_tokens`` counts confirmed tokens only. Items without data of their own, and shared-memory
        addresses, are skipped as in vLLM.
        """
        target = min(num_covered(features, max(num_computed_tokens, 0)), self.high)
        if target <= self.low and not (self._behind_in_order and self._behind_in_order[0] < target):
            return []
        stays = set(in_use)
        consumed: list[int] = []
        kept: list[int] = []
        while self._behind_in_order and self._behind_in_order[0] < target:
            item = heappop(self._behind_in_order)
            (kept if item in stays else consumed).append(item)
        self.behind.difference_update(consumed)
        for item in kept:
            heappush(self._behind_in_order, item)
        for i in range(self.low, target):
            if not is_held(features[i].data):
                continue
            if i in stays:
                self.give_back(i)
            else:
                consumed.append(i)
        self.low = max(self.low, target)
        return consumed


def is_held(data: Any) -> bool:
    """Return whether a worker that was sent this item holds its tensors (no cache hit, no shared-memory address)."""
    return data is not None and "address" not in data


class PendingInputs:
    """Answers `_get_encoder_input_updates` from ranges.

    1. Only requests with pending items are looked at; in a step of text there is none.
    2. The items of a `FeatureList` go without the data that the worker has consumed.
    3. Items that are not in order, and all items if ranges are off, are left to vLLM's own method.

    Args:
        by_range: whether ranges replace vLLM's sets (option ``pending_range``, no encoder-decoder model).
        strip: ``feature -> feature``, without data that no worker needs.
    """

    __slots__ = ("_by_range", "_strip")

    def __init__(self, *, by_range: bool, strip: Strip) -> None:
        self._by_range = by_range
        self._strip = strip

    def updates(
        self,
        scheduler: Scheduler,
        ask: Callable[[Any, Any, Any], Updates],
        scheduled: dict[str, int],
        new_requests: list[Any],
        scheduled_encoder_inputs: dict[str, list[int]],
    ) -> Updates:
        """Return, by request and item, the data to send again, and None for data that the worker may drop.

        Args:
            ask: vLLM's own method.
        """
        pending, requests = scheduler._pending_encoder_input_ids, scheduler.requests
        multimodal = [new for new in new_requests if new.mm_features] if new_requests else ()
        if not multimodal and not pending:
            return {}
        for new in multimodal:
            features = new.mm_features
            if isinstance(features, FeatureList) and not (self._by_range and features.spans.sequential):
                # vLLM searches for the items that were sent with their data.
                new.mm_features = features.as_sent(new.num_computed_tokens, self._strip)
        if not self._by_range:
            return ask(scheduled, new_requests, scheduled_encoder_inputs)
        others: dict[str, int] = {}
        for new in multimodal:
            features = requests[new.req_id].mm_features
            if in_order(features):
                low = num_covered(features, new.num_computed_tokens) if new.num_computed_tokens else 0
                pending[new.req_id] = HeldInputs(low, len(new.mm_features))
            else:
                others[new.req_id] = scheduled[new.req_id]
        updates: Updates = {}
        for request_id in scheduled if len(scheduled) <= len(pending) else [i for i in pending if i in scheduled]:
            held = pending.get(request_id)
            if held is None or request_id in others:
                continue
            if type(held) is not HeldInputs:
                others[request_id] = scheduled[request_id]
                continue
            encoding = scheduled_encoder_inputs.get(request_id, ())
            if encoding or held.low < held.high or held.behind:
                update = _update(requests[request_id], held, encoding)
                if update:
                    updates[request_id] = update
        if others:
            news = [new for new in multimodal if new.req_id in others]
            updates.update(ask(others, news, scheduled_encoder_inputs))
        return updates


def _update(request: Request, held: HeldInputs, encoding: Iterable[int]) -> dict[int, Any]:
    features = request.mm_features
    update: dict[int, Any] = {}
    for i in held.missing(encoding):
        # A running request may rewind without being sent anew.
        data = (features.with_data(i) if isinstance(features, FeatureList) else features[i]).data
        if is_held(data):
            update[i] = data
            held.give_back(i)
    confirmed = request.num_computed_tokens - max(request.num_output_placeholders, request.num_in_flight_tokens)
    update.update(dict.fromkeys(held.release(features, confirmed, encoding)))
    return update
