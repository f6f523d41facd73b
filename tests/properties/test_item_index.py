"""ItemIndex against a scan of all spans, for lists in any order, nested or not."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.items import ItemIndex

Span = tuple[int, int]

positions = st.integers(0, 60)
any_span = st.tuples(positions, st.integers(0, 25)).map(lambda at: (at[0], at[0] + at[1]))
gaps_and_lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=30)


def one_after_the_other(gaps: list[tuple[int, int]]) -> list[Span]:
    spans, end = [], 0
    for gap, length in gaps:
        spans.append((end + gap, end + gap + length))
        end += gap + length
    return spans


any_spans = st.lists(any_span, max_size=30) | gaps_and_lengths.map(one_after_the_other)


def scan(spans: list[Span], start: int, end: int) -> list[int]:
    overlapping = [i for i, (first, last) in enumerate(spans) if first < end and last > start]
    return sorted(overlapping, key=lambda i: spans[i][0])


@given(any_spans, st.lists(st.integers(1, 7)), st.lists(st.tuples(positions, st.integers(0, 30)), min_size=1))
def test_windows_are_what_a_scan_finds(spans: list[Span], chunks: list[int], windows: list[tuple[int, int]]) -> None:
    index = ItemIndex()
    known = 0
    for size in [*chunks, len(spans)]:  # grown in chunks, and asked in between
        chunk = spans[known : known + size]
        if len(chunk) == 1:
            index.append(*chunk[0])
        else:
            index.extend(chunk)
        known += len(chunk)
        for start, length in windows:
            assert list(index.overlapping(start, start + length)) == scan(spans[:known], start, start + length)
    assert len(index) == len(spans)


@given(any_spans, positions)
def test_covered_items_are_a_prefix_that_has_ended(spans: list[Span], position: int) -> None:
    covered = ItemIndex(spans).num_covered(position)
    assert all(end <= position for _, end in spans[:covered])
    assert covered == len(spans) or spans[covered][1] > position


@given(any_spans)
def test_sequential_means_that_nothing_ever_decreases(spans: list[Span]) -> None:
    never_back = all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(spans))
    assert ItemIndex(spans).sequential == never_back


@given(gaps_and_lengths, positions, st.integers(0, 30))
def test_bounds_of_a_sequential_list(gaps: list[tuple[int, int]], start: int, length: int) -> None:
    spans = one_after_the_other(gaps)
    assert list(range(*ItemIndex(spans).bounds(start, start + length))) == scan(spans, start, start + length)


@pytest.mark.parametrize("num_items", [1_000, 32_000])
def test_a_window_visits_as_many_spans_in_a_long_list_as_in_a_short_one(num_items: int) -> None:
    flat = ItemIndex((10 * i, 10 * i + 10) for i in range(num_items))
    nested = ItemIndex((10 * (i // 3) + i % 3, 10 * (i // 3) + 10 - 3 * (i % 3)) for i in range(num_items))
    late = ItemIndex([*((10 * i, 10 * i + 10) for i in range(1, num_items)), (0, 5)])
    middle = 10 * (num_items // 6)
    for index in (flat, nested, late):
        assert index.overlapping(middle, middle + 20)
    assert (flat.spans_visited, late.spans_visited) == (0, 2)
    assert nested.spans_visited <= 3 * 3
