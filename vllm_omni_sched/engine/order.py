"""Items of a request in the order of their tokens, which vLLM takes for granted and checks nowhere.

vLLM's own front end sorts them; whoever else makes requests may not. Out of order, a block's hash lacks the items that
the search did not get to, and the prefix cache takes two pictures for one.
"""

from typing import Any

from vllm.v1.request import Request

from vllm_omni_sched.items import FeatureList, is_in_line


def index_items(request: Request) -> bool:
    """Make the items of a request a `FeatureList`, sorted by where they start. False: they were in order.

    A request is hashed when it is made, so one that was out of order is hashed again.
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
    """Sort the items of a session's update, in place, by where they start. False: they were in order."""
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
