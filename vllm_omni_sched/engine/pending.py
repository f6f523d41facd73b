"""Encoder inputs whose data runner V2 still holds, as an index range (vLLM 0.33+).

vLLM keeps them as a set, filled by walking all items of every (re)installed request
and searched whole in every step: O(pending x encoding). Items are consumed in
order, so a range and a few exceptions say the same.
"""

from collections.abc import Collection, Iterable
from typing import Any

from vllm_omni_sched.items import FeatureList


class HeldInputs:
    """Items ``[low, high)`` of a sequential list, and the few below ``low`` that were given back.

    Args:
        low, high: items that a worker was just sent with their data.
    """

    __slots__ = ("behind", "high", "low")

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high
        self.behind: set[int] = set()

    def __contains__(self, item: int) -> bool:
        return self.low <= item < self.high or item in self.behind

    def release(self, features: FeatureList, num_computed_tokens: int, in_use: Collection[int]) -> Iterable[int]:
        """Ids that the worker may drop now, each reported once; those ``in_use`` stay.

        ``num_computed_tokens`` counts confirmed tokens only. Items without data of
        their own, and shared-memory addresses, are passed over as vLLM does.
        """
        target = min(features.index.num_covered(max(num_computed_tokens, 0)), self.high)
        consumed = [i for i in self.behind if i < target and i not in in_use]
        self.behind.difference_update(consumed)
        for i in range(self.low, target):
            if i in in_use:
                self.behind.add(i)
            elif is_held(features[i].data):
                consumed.append(i)
        self.low = max(self.low, target)
        return consumed


def is_held(data: Any) -> bool:
    """Whether a worker that was sent this item holds its tensors (no cache hit, no shared-memory address)."""
    return data is not None and "address" not in data
