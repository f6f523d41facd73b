"""Sorting of a request's items by their tokens, an order that vLLM assumes and never checks.

vLLM's own front end sorts items; other callers may not. If items are out of order, a block's hash lacks those that the
search did not reach, and the prefix cache takes two pictures for one.
"""

from typing import Any

from vllm.v1.request import Request

from vllm_omni_sched.items import FeatureList, is_in_line


def index_items(request: Request) -> bool:
    """Make the items of a request a `FeatureList`, sorted by start. Return False if they were in order already.

    A request is hashed when it is created, so a request that was out of order is hashed again.
    """
    features: list[Any] = request.mm_features
    request.mm_features = indexed = FeatureList(features)
    if indexed.spans.ascending:
        return False
    request.mm_features = FeatureList(sorted(features, key=_start))
    request.block_hashes.clear()
    request.update_block_hashes()
    return True


def sort_update(update: Request) -> bool:
    """Sort the items of a session's update by start, in place. Return False if they were in order already."""
    features: list[Any] = update.mm_features
    if is_in_line(features):
        return False
    starts = [_start(feature) for feature in features]
    if starts == sorted(starts):
        return False
    features.sort(key=_start)
    return True


def _start(feature: Any) -> int:
    offset: int = feature.mm_position.offset
    return offset
