"""Max-min fair split of a whole number."""

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
