"""Merging, its rules as a table; and the key of a piece of work."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.merging import Merger, MergeReason, content_key


def merger(*ids, key="k", **options):
    made = Merger(**options)
    for one in ids:
        made.join(key, one)
    return made


@pytest.mark.parametrize(
    ("present", "options", "key", "expected"),
    [
        ("", {}, None, ("alone", "n", "not_mergeable")),
        ("ab", {}, None, ("alone", "n", "not_mergeable")),
        ("", {}, "k", ("lead", "n", "new")),
        ("a", {}, "other", ("lead", "n", "new")),
        ("a", {}, "k", ("follow", "a", "same_work")),
        ("ab", {"max_followers": 2}, "k", ("follow", "a", "same_work")),
        ("abc", {"max_followers": 2}, "k", ("lead", "n", "full")),
        ("abcd", {"max_followers": 2}, "k", ("follow", "d", "same_work")),  # the new group takes the others
    ],
)
def test_joining(present, options, key, expected):
    joined = merger(*present, **options).join(key, "n")
    assert (joined.role.value, joined.leader, joined.reason.value) == expected


def test_followers_are_told_in_the_order_they_joined_and_the_group_ends():
    groups = merger("c", "a", "b")
    assert groups.members("c") == ("c", "a", "b")
    assert groups.finish("c") == ("a", "b")
    assert len(groups) == 0
    assert groups.join("k", "d").reason is MergeReason.NEW


def test_the_end_of_a_full_group_leaves_the_new_one_open():
    groups = merger("a", "b", "c", max_followers=1)
    assert groups.finish("a") == ("b",)
    assert groups.join("k", "d").leader == "c"


def test_equal_content_equal_key():
    one = content_key({"stage": 0, "inputs": ["a", b"\x00", None], "params": {"steps": 20, "scale": 7.5}})
    two = content_key({"params": {"scale": 7.5, "steps": 20}, "inputs": ("a", b"\x00", None), "stage": 0})
    assert one == two
    assert len(one) == 64
    # it must not change between versions of Python or of us: two processes of a cluster have to agree
    assert one == "7ba7da90584198012ad1c11c4827a2df1fdc8a1bf1aaf8aeaccfde5db6d6b78c"


@pytest.mark.parametrize("value", [object(), 1 << 64, "\ud800"])
def test_content_that_cannot_be_told_apart_is_refused(value):
    with pytest.raises(TypeError):
        content_key({"x": [value]})


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def typed(value):
    """The value with its types, since in Python 1 == 1.0 == True and 0.0 == -0.0."""
    if isinstance(value, list):
        return ("list", *map(typed, value))
    if isinstance(value, dict):
        return ("dict", *((key, typed(value[key])) for key in sorted(value)))
    return type(value).__name__, repr(value)


@settings(deadline=None)
@given(plain, plain)
def test_keys_are_equal_exactly_when_the_content_is(one, two):
    assert (content_key({"": one}) == content_key({"": two})) is (typed(one) == typed(two))


@pytest.mark.parametrize("values", [(1, 1.0, "1", b"1", True, None, [1], {"1": None}), (["ab"], ["a", "b"], "ab")])
def test_alike_is_not_equal(values):
    assert len({content_key({"x": one}) for one in values}) == len(values)
