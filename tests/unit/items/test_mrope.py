"""What of a growing prompt has to be computed, and where its positions are kept."""

from array import array
from dataclasses import dataclass

import numpy as np
import pytest

from vllm_omni_sched.items.mrope import GrowingRows, KnownPositions


@dataclass(frozen=True)
class Span:
    offset: int
    length: int


@dataclass(frozen=True)
class Item:
    mm_position: Span


def item(offset, length):
    return Item(Span(offset, length))


def known(tokens, items=(), next_position=10, num_positions=None):
    return KnownPositions(tokens, items, next_position, len(tokens) if num_positions is None else num_positions)


def test_the_tail_is_a_prompt_of_its_own():
    tokens, items = array("q", range(6)), [item(1, 3)]
    positions = known(tokens, items)
    tokens.extend([6, 7, 8])
    items.append(item(7, 2))
    tail = positions.tail(tokens, items)
    assert (list(tail.tokens), tail.items) == ([6, 7, 8], [item(1, 2)])
    positions.extend(tail, next_position=3, num_positions=3)
    assert (positions.num_tokens, positions.num_items, positions.next_position) == (9, 2, 13)
    assert positions.tail(tokens, items).tokens == array("q")


@pytest.mark.parametrize(
    ("items", "num_positions", "new"),
    [
        ([item(4, 4)], 6, []),  # an item reaches beyond the known tokens
        ([], 7, []),  # more positions than tokens
        ([], 6, [item(5, 2)]),  # a new item begins in what is known
    ],
)
def test_no_tail_where_the_whole_prompt_matters(items, num_positions, new):
    tokens = array("q", range(6))
    positions = known(tokens, items, num_positions=num_positions)
    tokens.extend([6, 7, 8])
    assert positions.tail(tokens, [*items, *new]) is None


def test_an_item_may_open_at_the_end_of_a_tail_and_stops_the_next():
    tokens, items = array("q", range(4)), []
    positions = known(tokens, items)
    tokens.extend([4, 5])
    items.append(item(5, 3))
    positions.extend(positions.tail(tokens, items), 2, 4)
    tokens.extend([6, 7])
    assert positions.tail(tokens, items) is None


def test_another_array_is_another_prompt():
    tokens = array("q", range(6))
    positions = known(tokens)
    assert positions.tail(array("q", range(8)), []) is None
    assert positions.tail(tokens, [item(0, 1)]) is None  # an item more, but no token
    del tokens[3:]
    assert positions.tail(tokens, []) is None


def test_rows_grow_by_doubling_and_never_write_to_what_they_were_given():
    first = np.arange(6).reshape(3, 2)
    first.flags.writeable = False
    rows, expected = GrowingRows(first), first
    for n in range(1, 200):
        new = np.full((3, n % 5), n)
        view = rows.append(new, plus=7)
        expected = np.concatenate([expected, new + 7], axis=1)
        assert np.array_equal(view, expected)
    assert rows.columns_copied <= 2 * rows.num_columns
