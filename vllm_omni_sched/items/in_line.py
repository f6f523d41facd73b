"""Search in consecutive items of vLLM's own list, without an index.

An index costs a pass over all items, and a list subclass doubles the cost of each ``features[i]`` in vLLM's loops:
CPython's fast path for subscripts is for exact lists. The scheduler keeps a request's exact list if this module can
search it, and makes a `FeatureList` of any other.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_omni_sched.items.feature_list import FeatureList


def is_in_line(features: Iterable[Any]) -> bool:
    """Return whether each item begins at or after the end of the one before it. Visits each item once."""
    end = 0
    for feature in features:
        position = feature.mm_position
        start = position.offset
        if start < end:
            return False
        end = start + position.length
    return True


def in_order(features: Sequence[Any]) -> bool:
    """Return whether starts and ends never decrease, for a request that the scheduler has admitted. O(1)."""
    return type(features) is list or (isinstance(features, FeatureList) and features.spans.sequential)


def ends_after(features: Sequence[Any], position: int) -> bool:
    """Return whether any item of a request that the scheduler has admitted has a token at or after
    ``position``. O(1).
    """
    if type(features) is list:
        last = features[-1].mm_position
        return bool(last.offset + last.length > position)
    return isinstance(features, FeatureList) and features.ends_after(position)


def num_covered(features: Sequence[Any], position: int) -> int:
    """Return how many leading items end at or before ``position``, for items that are `in_order`. O(log n)."""
    if isinstance(features, FeatureList):
        return features.spans.num_covered(position)
    return bisect_right(features, position, key=_end)


def _end(feature: Any) -> int:
    end: int = feature.mm_position.offset + feature.mm_position.length
    return end
