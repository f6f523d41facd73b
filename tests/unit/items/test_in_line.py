"""Items in vLLM's own list: which lists may stay what they are, and what is read off them."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.items import FeatureList, ends_after, in_order, is_in_line, num_covered


def items(*spans: tuple[int, int]) -> list[Any]:
    return [SimpleNamespace(mm_position=SimpleNamespace(offset=start, length=end - start)) for start, end in spans]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 4)], True),
        ([(0, 4), (4, 8), (9, 9), (9, 12)], True),
        ([(0, 4), (3, 8)], False),
        ([(0, 8), (2, 4)], False),
        ([(4, 8), (0, 4)], False),
    ],
    ids=["one", "one after another", "overlapping", "nested", "out of order"],
)
def test_what_may_stay_a_list(spans: list[tuple[int, int]], expected: bool):
    assert is_in_line(items(*spans)) is expected


def test_a_list_is_searched_where_it_lies():
    features = items(*((i, i + 1) for i in range(10_000)))
    looked_at = []

    class Looked(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            looked_at.append(index)
            return super().__getitem__(index)

    assert num_covered(Looked(features), 7_000) == 7_000
    assert len(looked_at) <= 15


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12),
    position=st.integers(0, 60),
)
def test_a_list_in_line_answers_as_its_index_does(steps: list[tuple[int, int]], position: int):
    spans, end = [], 0
    for gap, length in steps:
        spans.append((end + gap, end + gap + length))
        end += gap + length
    features = items(*spans)
    indexed = FeatureList(features)
    assert is_in_line(features)
    assert in_order(features)
    assert in_order(indexed)
    assert num_covered(features, position) == num_covered(indexed, position)
    assert ends_after(features, position) == ends_after(indexed, position)


def test_a_nested_list_is_not_in_order():
    assert not in_order(FeatureList(items((0, 8), (2, 4))))
