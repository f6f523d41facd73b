"""Items one after another, in vLLM's own list: searched there, without an index beside it.

An index costs a pass over all items, and a list that carries one makes each ``features[i]`` in vLLM's loops twice as
dear: CPython's fast path for subscripts is for exact lists. The scheduler lets a request keep its exact list where this
module can answer for it, and makes a `FeatureList` of any other.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_omni_sched.items.feature_list import FeatureList


def is_in_line(features: Iterable[Any]) -> bool:
    """Whether each item begins where the one before it ends, or later. Each is looked at once."""
    end = 0
    for feature in features:
        position = feature.mm_position
        start = position.offset
        if start < end:
            return False
        end = start + position.length
    return True


def in_order(features: Sequence[Any]) -> bool:
    """Whether neither starts nor ends ever decrease, of a request that the scheduler has let in. O(1)."""
    return type(features) is list or (isinstance(features, FeatureList) and features.spans.sequential)


def ends_after(features: Sequence[Any], position: int) -> bool:
    """Whether any item of a request that the scheduler has let in has a token at or after ``position``. O(1)."""
    if type(features) is list:
        last = features[-1].mm_position
        return bool(last.offset + last.length > position)
    return isinstance(features, FeatureList) and features.ends_after(position)


def num_covered(features: Sequence[Any], position: int) -> int:
    """How many leading items end at or before ``position``, of items that are `in_order`. O(log n)."""
    if isinstance(features, FeatureList):
        return features.spans.num_covered(position)
    return bisect_right(features, position, key=_end)


def _end(feature: Any) -> int:
    end: int = feature.mm_position.offset + feature.mm_position.length
    return end
