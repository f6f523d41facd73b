"""`lanes_to_widen`: which lane of a pool may use the processors of all."""

import pytest

from vllm_omni_sched.resource.engine.lane import lanes_to_widen


@pytest.mark.parametrize(
    ("jobs", "llm_idle", "wide"),
    [
        ([0, 0], True, [False, False]),
        ([1, 0], True, [True, False]),
        ([0, 1], True, [False, True]),
        ([3, 0], True, [True, False]),  # the others wait behind the first one
        ([1, 1], True, [False, False]),
        ([1, 0], False, [False, False]),
        ([1], True, [True]),
        ([], True, []),
    ],
)
def test_rules(jobs: list[int], llm_idle: bool, wide: list[bool]) -> None:
    assert lanes_to_widen(jobs, llm_idle=llm_idle) == wide
