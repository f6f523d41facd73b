"""Encoder inputs whose data runner V2 still holds, as an index range (vLLM 0.33+).

vLLM keeps them as a set, which it fills by walking all items of every (re)installed request and searches whole in every
step: O(pending x encoding). Items are consumed in order, so a range and a few exceptions hold the same information.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

from vllm.v1.request import Request

from vllm_omni_sched.items import FeatureList, in_order, num_covered
from vllm_omni_sched.items.feature_list import Strip


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
        """Note that the worker is sent this item again."""
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


class PendingRangeMixin:
    """Makes a scheduler answer `_get_encoder_input_updates` from ranges."""

    _omni_pending: bool
    _omni_runner_v2: bool
    _omni_strip: Strip

    def _get_encoder_input_updates(
        self, scheduled: dict[str, int], new_requests: list[Any], scheduled_encoder_inputs: dict[str, list[int]]
    ) -> dict[str, dict[int, Any]]:
        if not self._omni_runner_v2:
            nothing: dict[str, dict[int, Any]] = super()._get_encoder_input_updates(
                scheduled, new_requests, scheduled_encoder_inputs
            )
            return nothing
        for new in new_requests:
            features = new.mm_features
            if isinstance(features, FeatureList) and not (self._omni_pending and features.spans.sequential):
                # vLLM searches for the items that were sent with their data.
                new.mm_features = features.as_sent(new.num_computed_tokens, self._omni_strip)
        if not self._omni_pending:
            updates: dict[str, dict[int, Any]] = super()._get_encoder_input_updates(
                scheduled, new_requests, scheduled_encoder_inputs
            )
            return updates
        others: dict[str, int] = {}
        for request_id, num_tokens in scheduled.items():
            features = self.requests[request_id].mm_features
            if features and not in_order(features):
                others[request_id] = num_tokens
        news = [n for n in new_requests if n.req_id in others]
        updates = super()._get_encoder_input_updates(others, news, scheduled_encoder_inputs) if others else {}
        for new in new_requests:
            if new.mm_features and new.req_id not in others:
                features = self.requests[new.req_id].mm_features
                low = num_covered(features, new.num_computed_tokens) if new.num_computed_tokens else 0
                self._pending_encoder_input_ids[new.req_id] = HeldInputs(low, len(new.mm_features))
        for request_id in scheduled:
            held = self._pending_encoder_input_ids.get(request_id)
            if isinstance(held, HeldInputs):
                update = self._omni_held_update(
                    self.requests[request_id], held, scheduled_encoder_inputs.get(request_id, ())
                )
                if update:
                    updates[request_id] = update
        return updates

    def _omni_held_update(self, request: Request, held: HeldInputs, encoding: Any) -> dict[int, Any]:
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
