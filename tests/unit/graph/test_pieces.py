"""Progressive batching: who gets how large a piece."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.graph.pieces import PieceReason, Pieces, Work


@pytest.mark.parametrize(
    ("works", "budget", "expected"),
    [
        ([(100, 0)], 512, [(100, "whole")]),
        ([(1000, 0)], 512, [(512, "budget")]),
        ([(1000, 0), (1000, 0)], 512, [(256, "shared"), (256, "shared")]),
        ([(1000, 0), (50, 0)], 512, [(462, "shared"), (50, "whole")]),  # the short one goes whole
        ([(1000, 0), (50, 0), (1000, 0)], 512, [(231, "shared"), (50, "whole"), (231, "shared")]),
        ([(1000, 0)] * 3, 200, [(66, "shared"), (67, "shared"), (67, "shared")]),
        ([(1000, 0)] * 3, 130, [(65, "shared"), (65, "shared"), (0, "no_room")]),  # not three of 43
        ([(64, 0), (1000, 0)], 100, [(64, "whole"), (36, "shared")]),  # nothing wasted
        ([(1000, 0), (10, 0)], 10, [(10, "budget"), (0, "no_room")]),
        ([(1000, 3), (1000, 4)], 64, [(0, "no_room"), (64, "overdue")]),
        ([(1000, 4), (1000, 5)], 64, [(0, "no_room"), (64, "overdue")]),
        ([(1000, 0), (30, 4)], 64, [(34, "shared"), (30, "whole")]),
        ([(1000, 0)], 0, [(0, "no_room")]),
        ([], 10, []),
    ],
)
def test_rules(works, budget, expected):
    plan = Pieces(min_piece=64, max_skips=4).plan([Work(f"r{i}", *w) for i, w in enumerate(works)], budget)
    assert [(piece.amount, piece.reason.value) for piece in plan] == expected
    assert [piece.request_id for piece in plan] == [f"r{i}" for i in range(len(works))]


works_ = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 12)), max_size=12)


@settings(deadline=None)
@given(works_, st.integers(0, 4096), st.integers(1, 300), st.integers(1, 8))
def test_no_budget_is_wasted_and_none_invented(works, budget, min_piece, max_skips):
    works = [Work(f"r{i}", *w) for i, w in enumerate(works)]
    plan = Pieces(min_piece, max_skips).plan(works, budget)
    assert sum(piece.amount for piece in plan) == min(budget, sum(work.remaining for work in works))
    for work, piece in zip(works, plan, strict=True):
        assert 0 <= piece.amount <= work.remaining
        assert (piece.amount == 0) == (piece.reason is PieceReason.NO_ROOM)
        assert (piece.amount == work.remaining) == (piece.reason is PieceReason.WHOLE)
    small = [p for p in plan if 0 < p.amount < min_piece and p.reason is not PieceReason.WHOLE]
    assert len(small) <= 1  # rule 4's


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.lists(st.integers(1, 90), min_size=5, max_size=5))
def test_the_pieces_add_up_and_nobody_gets_nothing_for_ever(sizes, budgets):
    """Newcomers that never end take part in each step, ahead of the rest; the rest still ends, within the bound."""
    policy = Pieces(min_piece=32, max_skips=3)
    left = {f"r{i}": size for i, size in enumerate(sizes)}
    given_, skipped, step = dict.fromkeys(left, 0), dict.fromkeys(left, 0), 0
    while left:
        newcomers = [Work(f"n{step}-{i}", 1000) for i in range(3)]
        works = newcomers + [Work(name, left[name], skipped[name]) for name in left]
        for piece in policy.plan(works, budgets[step % len(budgets)])[len(newcomers) :]:
            name = piece.request_id
            skipped[name] = 0 if piece.amount else skipped[name] + 1
            assert skipped[name] <= policy.max_skips + len(sizes)
            given_[name] += piece.amount
            left[name] -= piece.amount
            if not left[name]:
                del left[name]
        step += 1
    assert list(given_.values()) == sizes


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Pieces(min_piece=0), ConfigError, "min_piece"),
        (lambda: Pieces(max_skips=0), ConfigError, "max_skips"),
        (lambda: Pieces().plan([], -1), ValueError, "budget"),
        (lambda: Work("a", 0), ValueError, "remaining"),
        (lambda: Work("a", 1, -1), ValueError, "skipped"),
    ],
)
def test_bad_parameters(make, error, message):
    with pytest.raises(error, match=message):
        make()
