"""Split a whole number by weighted max-min fairness."""

from collections.abc import Sequence


def max_min(capacity: int, demands: Sequence[int], weights: Sequence[int] | None = None) -> list[int]:
    """Split ``capacity`` so that no share can grow without taking from a smaller one.

    1. No share exceeds its demand; the remainder goes to the others, by their weights.
    2. The shares add up to the smaller of the capacity and all demands together.
    3. Shares are whole numbers: each may differ from the exact one by as many units as there are demands.

    Progressive filling: Bertsekas and Gallager, "Data Networks", 6.5.2.

    Raises:
        ValueError: the capacity or a demand is negative, or a weight is below 1.
    """
    weights = [1] * len(demands) if weights is None else weights
    if capacity < 0 or min(demands, default=0) < 0:
        raise ValueError(f"capacity and demands must be 0 or more, got {capacity} and {list(demands)}")
    if len(weights) != len(demands) or min(weights, default=1) < 1:
        raise ValueError(f"weights must be whole numbers of 1 or more, one for each demand, got {list(weights)}")
    shares = [0] * len(demands)
    weight_left = sum(weights)
    # The demand that is satisfied first is served first: the rest is then split anew among the others.
    for i in sorted(range(len(demands)), key=lambda i: demands[i] / weights[i]):
        shares[i] = min(demands[i], capacity * weights[i] // weight_left)
        capacity -= shares[i]
        weight_left -= weights[i]
    return shares
