"""Split the tokens of a step among prompts."""

from collections.abc import Sequence


def max_min(capacity: int, demands: Sequence[int]) -> list[int]:
    """Split ``capacity`` so that nobody's share can grow without taking from somebody with less.

    1. Nobody gets more than it demands; what it leaves goes to the others, in equal parts.
    2. The shares add up to the smaller of the capacity and all demands together.
    3. Shares are whole numbers: each may differ from the exact one by as many units as there are demands.

    Progressive filling: Bertsekas and Gallager, "Data Networks", 6.5.2.

    Raises:
        ValueError: the capacity or a demand is negative.
    """
    if capacity < 0 or min(demands, default=0) < 0:
        raise ValueError(f"capacity and demands must be 0 or more, got {capacity} and {list(demands)}")
    shares = [0] * len(demands)
    # Who is satisfied first comes first: the rest is then split anew among those behind.
    for before, i in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        shares[i] = min(demands[i], capacity // (len(demands) - before))
        capacity -= shares[i]
    return shares


LOOK_AHEAD = 16
"""Waiting requests that a plan takes into account; a step seldom starts more."""

MIN_PIECE = 64
"""Tokens from which on a piece is worth its place in a step."""


def longest_piece(remaining: Sequence[int], budget: int) -> int:
    """Return the most tokens that one request gets in a step, so that the others get theirs.

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
