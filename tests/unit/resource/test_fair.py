"""Weighted max-min fairness."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.fair import max_min


@pytest.mark.parametrize(
    ("capacity", "demands", "weights", "shares"),
    [
        (10, [], None, []),
        (10, [3, 4], None, [3, 4]),
        (10, [20, 20], None, [5, 5]),
        (10, [2, 20, 20], None, [2, 4, 4]),
        (10, [20, 1, 20, 3], None, [3, 1, 3, 3]),
        (12, [20, 20], [1, 3], [3, 9]),
        (12, [20, 4], [1, 3], [8, 4]),
        (1, [1, 1], None, [0, 1]),
        (0, [5], None, [0]),
    ],
)
def test_table(capacity, demands, weights, shares):
    assert max_min(capacity, demands, weights) == shares


pairs = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 9)), min_size=1, max_size=10)


@settings(deadline=None)
@given(st.integers(0, 20_000), pairs)
def test_conserving_and_fair(capacity, pairs):
    demands, weights = [d for d, _ in pairs], [w for _, w in pairs]
    shares = max_min(capacity, demands, weights)
    assert sum(shares) == min(capacity, sum(demands))
    for i, share in enumerate(shares):
        assert 0 <= share <= demands[i]
        for j in range(len(shares)):
            if share < demands[i]:  # it wants more: nobody is better off, but for rounding
                assert share / weights[i] >= shares[j] / weights[j] - len(shares)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1, [1]), "capacity"), ((1, [-1]), "demands"), ((1, [1], [0]), "weights"), ((1, [1], [1, 1]), "weights")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        max_min(*arguments)
