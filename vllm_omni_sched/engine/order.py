"""Items of a request in the order of their tokens, which vLLM takes for granted and checks nowhere."""

from vllm.v1.request import Request


def put_in_order(request: Request, *, is_new: bool) -> bool:
    """Sort the items of an arriving request, or of a session's update, by where they start. False: they were in order.

    vLLM's own front end sorts them; whoever else makes requests may not. Out of order, a block's hash lacks the items
    that the search did not get to, and the prefix cache takes two pictures for one. A new request is hashed when it is
    made, so its hashes are made again.
    """
    features = request.mm_features
    starts = [feature.mm_position.offset for feature in features]
    if starts == sorted(starts):
        return False
    features.sort(key=lambda feature: feature.mm_position.offset)
    if is_new:
        request.block_hashes.clear()
        request.update_block_hashes()
    return True
