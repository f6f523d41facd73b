"""Max-min fairness."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.fair import max_min


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
