"""Affinity: what the book knows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.affinity import AffinityBook


def book(*notes, capacity=100):
    made = AffinityBook(capacity)
    for replica, keys, *weight in notes:
        made.note(replica, keys, *weight)
    return made


@pytest.mark.parametrize(
    ("notes", "keys", "expected"),
    [
        ([], "ab", {0: 0.0, 1: 0.0}),
        ([(0, "ab")], "", {0: 0.0, 1: 0.0}),
        ([(0, "ab"), (1, "b")], "ab", {0: 1.0, 1: 0.5}),
        ([(0, "ab")], "aaab", {0: 1.0, 1: 0.0}),  # a key counts once
        ([(0, "a", 3.0), (1, "b", 1.0)], "ab", {0: 0.75, 1: 0.25}),
        ([(0, "a", 1.0), (0, "a", 3.0), (1, "b", 1.0)], "ab", {0: 0.75, 1: 0.25}),  # the newest weight
        ([(0, "a", 4.0), (1, "b", 2.0)], "ac", {0: 4 / 7, 1: 0.0}),  # c is unknown, and weighs their mean
        ([(7, "a")], "a", {0: 0.0, 1: 0.0}),  # not asked about
    ],
)
def test_how_much_of_a_request_is_where(notes, keys, expected):
    assert book(*notes).warm(keys, [0, 1]) == pytest.approx(expected)


def test_what_was_noted_longest_ago_goes_first():
    known = book((0, "abc"), capacity=3)
    known.note(0, "a")
    known.note(1, "x")
    assert known.warm("b", [0]) == {0: 0.0}
    assert known.warm("ac", [0]) == {0: 1.0}
    assert len(known) == 3


def test_a_replica_that_died_has_nothing():
    known = book((0, "ab"), (1, "bc"))
    known.forget(0)
    known.forget(5)
    assert known.warm("abc", [0, 1]) == pytest.approx({0: 0.0, 1: 2 / 3})
    assert len(known) == 2


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["note", "forget"]), st.integers(0, 2), st.text("abcdef", max_size=4)), max_size=40
    ),
    st.integers(1, 6),
    st.sets(st.sampled_from("abcdefg"), min_size=1),
)
def test_the_book_against_a_list(operations, capacity, keys):
    known, entries = AffinityBook(capacity), []
    for what, replica, of in operations:
        if what == "forget":
            known.forget(replica)
            entries = [entry for entry in entries if entry[0] != replica]
            continue
        known.note(replica, of)
        for key in of:
            entries = [*(entry for entry in entries if entry != (replica, key)), (replica, key)][-capacity:]
    assert len(known) == len(entries)
    expected = {replica: sum((replica, key) in entries for key in keys) / len(keys) for replica in range(3)}
    assert known.warm(keys, range(3)) == pytest.approx(expected)


def test_who_has_something_of_a_key_is_known_without_a_look_at_all() -> None:
    known = AffinityBook[int]()
    for replica in range(50):
        known.note(replica, "a")
    known.note(7, "ab")
    known.note(3, "b")
    assert known.holders("b") == [3, 7]
    assert known.holders("a", most=3) == [7, 49, 48]
    assert known.holders("ab", most=2) == [7, 49, 3]
    assert known.holders("c") == []
    known.forget(7)
    assert known.holders("b") == [3]
    small = AffinityBook[int](capacity=1)
    small.note(0, "a")
    small.note(1, "b")
    assert (small.holders("a"), small.holders("b")) == ([], [1])
