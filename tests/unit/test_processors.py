"""Where process lanes work: the rules, and what is read of this machine."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.lanes.processors import Processors, bound_here, choose, parse, siblings_of


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
