"""Progressive batching: how much of a step one request gets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.pieces import longest_piece


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
def test_rules(remaining, budget, longest):
    assert longest_piece(remaining, budget) == longest


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 4096))
def test_the_budget_is_used_up_by_those_who_come_first(remaining, budget):
    longest, left = longest_piece(remaining, budget), budget
    assert 1 <= longest <= min(budget, max(remaining))
    for tokens in remaining:  # as a step goes through them
        left -= min(tokens, longest, left)
    assert left == 0 or budget > sum(remaining)
