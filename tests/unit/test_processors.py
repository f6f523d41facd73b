"""Where process lanes work: the rules, and what is read of this machine."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.lanes.processors import (
    Part,
    Processors,
    beside_the_llm,
    bound_here,
    choose,
    choose_part,
    parse,
    siblings_of,
    together,
)


def alone(cpu: int) -> set[int]:
    return {cpu}


def two_threads(cpu: int) -> set[int]:
    """Processor n and n + 8 are one core."""
    return {cpu % 8, cpu % 8 + 8}


def own(*cpus: int) -> Processors:
    return Processors(frozenset(cpus), len(cpus), own=True)


def shared(*cpus: int, threads: int = 1) -> Processors:
    return Processors(frozenset(cpus), threads, own=False)


@pytest.mark.parametrize(
    ("option", "allowed", "bound", "siblings", "expected"),
    [
        ("auto", {0, 1}, {0}, alone, (own(1), shared(0))),
        ("auto", {0, 1, 2}, {0, 1}, alone, (own(2), shared(0, 1, threads=2))),
        ("auto", {0, 1, 2, 3}, {0, 1, 2}, alone, (shared(0, 1, 2, threads=3),)),  # one core would be slower than three
        ("auto", {0, 1}, {0, 1}, alone, (shared(0, 1, threads=2),)),  # bound to nothing
        # the other thread of a core that works for the LLM is none of its own; of a free core one thread is enough
        ("auto", set(range(16)), {0, 1, 2, 3}, two_threads, (own(4, 5, 6, 7), shared(0, 1, 2, 3, threads=4))),
        ("auto", set(range(16)), set(range(7)), two_threads, (shared(*range(7), threads=7),)),
        ("shared", {0, 1}, {0}, alone, (shared(0),)),
        ("1", {0, 1}, {0}, alone, (own(1),)),
        ("0-1", {0, 1}, {0}, alone, (shared(0, 1, threads=2),)),
    ],
)
def test_rules(option, allowed, bound, siblings, expected):
    assert choose(option, allowed, bound, siblings, len(bound)) == expected


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        ((), None),
        ((own(1),), None),
        ((own(1), shared(0)), None),  # as quick as the LLM's processors already
        ((own(2, 3), shared(0, 1, threads=2)), None),
        ((own(4, 5), shared(0, 1, 2, 3, threads=4)), shared(0, 1, 2, 3, 4, 5, threads=6)),
    ],
)
def test_the_processors_of_several_lanes_together(lanes, expected):
    assert together(lanes) == expected


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        ((), []),
        ((own(1),), []),  # listed for the lane by the operator
        ((shared(0, 1, threads=2),), []),
        ((own(5, 4), shared(0, 1, threads=2)), [4, 5]),
    ],
)
def test_the_processors_that_an_encode_in_the_step_may_use_beside_those_of_the_llm(lanes, expected):
    assert beside_the_llm(lanes) == expected


def test_a_processor_that_is_not_allowed_is_named():
    with pytest.raises(ConfigError, match="'encode_lane_cpus' has 5,6, but this process may use 0,1 only"):
        choose("1,5-6", {0, 1}, {0}, alone, 1)


@given(st.sets(st.integers(0, 15), min_size=1), st.data())
def test_what_is_own_is_allowed_and_touches_no_core_of_the_llm(allowed, data):
    bound = data.draw(st.sets(st.sampled_from(sorted(allowed)), min_size=1))
    first, *others = choose("auto", allowed, bound, two_threads, len(bound))
    assert first.cpus <= allowed
    assert first.own == bool(others)
    if first.own:
        assert not {cpu % 8 for cpu in first.cpus} & {cpu % 8 for cpu in bound}
        assert 2 * len(first.cpus) >= len(bound)


@pytest.mark.parametrize(("text", "cpus"), [("3", {3}), ("0,2", {0, 2}), ("4-7,1", {1, 4, 5, 6, 7})])
def test_lists(text, cpus):
    assert parse(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "1,", "1-", "-1", "1--2", "all"])
def test_no_list(text):
    with pytest.raises(ConfigError, match="such as '1,4-7'"):
        parse(text)


def test_what_openmp_will_bind_threads_to_is_what_its_variables_say(monkeypatch):
    here = os.sched_getaffinity(0)
    first = min(here)
    for name in ("GOMP_CPU_AFFINITY", "OMP_PLACES", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    assert here <= bound_here()
    monkeypatch.setenv("OMP_PLACES", f"{{{first}}}")
    assert bound_here() == {first}
    monkeypatch.setenv("OMP_PLACES", "cores")
    assert here <= bound_here()


def test_a_processor_is_among_its_siblings():
    assert all(cpu in siblings_of(cpu) for cpu in os.sched_getaffinity(0))
    assert siblings_of(100_000) == {100_000}


def part(rank: int, bound: set[int]) -> Part:
    return Part(rank, 2, frozenset(bound))


@pytest.mark.parametrize(
    ("option", "allowed", "expected"),
    [
        # the LLM's threads: rank 0 on 0 and 1, rank 1 on 2 and 3
        ("auto", range(4), [({0, 1}, 2, False), ({2, 3}, 2, False)]),
        ("auto", range(8), [({4, 6}, 2, True), ({5, 7}, 2, True)]),
        ("auto", range(6), [({4}, 1, True), ({5}, 1, True)]),
        ("auto", range(5), [({0, 1}, 2, False), ({2, 3}, 2, False)]),  # one rank would wait for the other
        ("shared", range(8), [({0, 1}, 2, False), ({2, 3}, 2, False)]),
        ("3,5-7", range(8), [({3, 6}, 2, False), ({5, 7}, 2, False)]),
        ("5-7", range(8), [({5, 7}, 2, True), ({6}, 1, True)]),
    ],
)
def test_ranks_share_what_the_llm_leaves_on_all_of_them(option, allowed, expected):
    bound = [{0, 1}, {2, 3}]
    for rank in (0, 1):
        (mine,) = choose_part(option, allowed, bound[rank], alone, 2, part(rank, {0, 1, 2, 3}))
        assert (set(mine.cpus), mine.threads, mine.own) == expected[rank]


def test_each_rank_needs_a_processor():
    with pytest.raises(ConfigError, match=r"'encode_lane_cpus' has 7, but each of 2 ranks needs a processor"):
        choose_part("7", range(8), {0}, alone, 1, part(0, {0, 1}))
