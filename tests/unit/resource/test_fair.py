"""Max-min fairness, and progressive batching: how much of a step one request gets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.engine.pieces import longest_piece, max_min


@pytest.mark.parametrize(
    ("capacity", "demands", "shares"),
    [
        (10, [], []),
        (10, [3, 4], [3, 4]),
        (10, [20, 20], [5, 5]),
        (10, [2, 20, 20], [2, 4, 4]),
        (10, [20, 1, 20, 3], [3, 1, 3, 3]),
        (1, [1, 1], [0, 1]),
        (0, [5], [0]),
    ],
)
def test_table(capacity, demands, shares):
    assert max_min(capacity, demands) == shares


@settings(deadline=None)
@given(st.integers(0, 20_000), st.lists(st.integers(0, 5000), min_size=1, max_size=10))
def test_conserving_and_fair(capacity, demands):
    shares = max_min(capacity, demands)
    assert sum(shares) == min(capacity, sum(demands))
    for share, demand in zip(shares, demands, strict=True):
        assert 0 <= share <= demand
        if share < demand:  # it wants more: nobody is better off, but for rounding
            assert share >= max(shares) - len(shares)


@pytest.mark.parametrize(("arguments", "message"), [((-1, [1]), "capacity"), ((1, [-1]), "demands")])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        max_min(*arguments)


@pytest.mark.parametrize(
    ("remaining", "budget", "longest"),
    [
        ([100], 512, 100),
        ([1000], 512, 512),
        ([1000, 1000], 512, 256),
        ([1000, 50], 512, 462),  # the short one goes whole
        ([1000, 50, 1000], 512, 231),
        ([1000] * 3, 200, 67),
        ([1000] * 3, 130, 65),  # not three of 43
        ([64, 1000], 100, 64),
        ([1, 1, 1000], 60, 58),  # nothing wasted
        ([1000, 10], 10, 10),
    ],
)
def test_longest_piece(remaining, budget, longest):
    assert longest_piece(remaining, budget) == longest


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 4096))
def test_the_budget_is_used_up_by_those_who_come_first(remaining, budget):
    longest, left = longest_piece(remaining, budget), budget
    assert 1 <= longest <= min(budget, max(remaining))
    for tokens in remaining:  # as a step goes through them
        left -= min(tokens, longest, left)
    assert left == 0 or budget > sum(remaining)
