"""Progressive batching: long requests go in pieces, so that one does not fill a step alone."""

from collections.abc import Sequence

from vllm_omni_sched.resource.fair import max_min

LOOK_AHEAD = 16
"""Waiting requests that a plan takes into account; a step seldom starts more."""

MIN_PIECE = 64
"""Tokens from which on a piece is worth its place in a step."""


def longest_piece(remaining: Sequence[int], budget: int) -> int:
    """Tokens that one request gets of a step, at most, so that the others get theirs.

    1. As many requests take part, in order, as can each have `MIN_PIECE`, or all that remains of them if that is less.
       One takes part in any case.
    2. The budget is split among these max-min fairly: short requests go whole, long ones share the rest.
    3. What is left over goes to the next in order, as a small piece: no budget is wasted.

    Args:
        remaining: tokens that each request still wants, in the waiting order; one or more.
        budget: tokens of the step, 1 or more.
    """
    chosen, needed = 0, 0
    for tokens in remaining:
        needed += min(tokens, MIN_PIECE)
        if chosen and needed > budget:
            break
        chosen += 1
    shares = max_min(budget, remaining[:chosen])
    following = remaining[chosen] if chosen < len(remaining) else 0
    return max(*shares, min(budget - sum(shares), following))
