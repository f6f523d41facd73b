"""Searches over a function of one number: where they end, and how often they ask."""

from __future__ import annotations

import math

import pytest

from vllm_omni_sched.sim.study.evaluate import largest, needed


@pytest.mark.parametrize("start", [0.5, 7.0, 13.7, 100.0, 900.0])
def test_it_ends_at_the_edge_wherever_it_starts(start: float) -> None:
    edge = largest(lambda value: value <= 13.7, start, 0.02, 12)
    assert edge.fails is not None
    assert edge.holds <= 13.7 < edge.fails <= edge.holds * 1.02
    assert edge.monotone


def test_no_value_is_asked_twice_and_few_are() -> None:
    asked: list[float] = []

    def holds(value: float) -> bool:
        asked.append(value)
        return value <= 10

    largest(holds, 1.0, 0.05, 12)
    assert len(asked) == len(set(asked))
    assert asked[:6] == [1, 2, 4, 8, 16, 32]
    assert len(asked) <= 6 + math.ceil(math.log2(math.log(2) / math.log(1.05)))


def test_one_failure_by_chance_does_not_end_it() -> None:
    edge = largest(lambda value: value <= 40 and value != 4, 1.0, 0.05, 12)
    assert 38 <= edge.holds <= 40
    assert not edge.monotone
    assert (4.0, False) in edge.tried


def test_where_nothing_holds_it_is_0() -> None:
    edge = largest(lambda value: False, 8.0, 0.05, 3)
    assert edge.holds == 0
    assert edge.fails == 1.0
    assert [value for value, _ in edge.tried] == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_where_all_hold_nothing_fails() -> None:
    edge = largest(lambda value: True, 1.0, 0.05, 4)
    assert edge.holds == 8.0
    assert edge.fails is None


@pytest.mark.parametrize(
    ("factors", "attainment", "answer"),
    [
        ([3.0, 1.0, 2.0, 4.0], 0.5, 2.0),
        ([3.0, 1.0, 2.0, 4.0], 0.51, 3.0),
        ([float(one) for one in range(1, 11)], 0.9, 9.0),
        ([float(one) for one in range(1, 11)], 1.0, 10.0),
        ([1.0, math.inf], 0.9, math.inf),
        ([], 0.9, math.inf),
    ],
)
def test_the_factor_that_is_needed(factors: list[float], attainment: float, answer: float) -> None:
    assert needed(factors, attainment) == answer
