"""The limit of a batch while memory is short."""

import math
from itertools import pairwise

import pytest

from vllm_omni_sched.resource.batch_size import LimitReason
from vllm_omni_sched.resource.pid import PidBatch

TARGET = 0.05


def observed(control: PidBatch, latency: float, times: int, used: float, start: float = 0.0) -> list[int]:
    """The limit after each of so many intervals of full steps, with such a part of the memory in use."""
    control.note_memory(used)
    found = []
    for number in range(times):
        control.observe(latency, start + number * 1.0)
        found.append(control.limit)
    return found


def test_with_too_much_memory_in_use_the_limit_falls_however_fast_steps_are():
    control = PidBatch(TARGET, start=16, memory_high=0.9)
    limits = observed(control, TARGET / 4, 200, used=0.99)
    assert all(later <= earlier for earlier, later in pairwise([16, *limits]))
    assert (limits[-1], control.reason) == (1, LimitReason.MEMORY)
    freed = observed(control, TARGET / 4, 20, used=0.5, start=1000.0)
    assert freed[-1] > 8


def test_it_falls_though_steps_are_on_target_or_never_full():
    on_target, not_full = (PidBatch(TARGET, start=16, memory_high=0.9) for _ in range(2))
    assert observed(on_target, TARGET, 50, used=1.0)[-1] < 16
    not_full.note_memory(1.0)
    for number in range(50):
        not_full.observe(TARGET / 4, float(number), size=1)
    assert not_full.limit < 16


def test_too_slow_steps_make_it_fall_faster_than_memory_does():
    by_memory, by_both = (PidBatch(TARGET, start=32, memory_high=0.9) for _ in range(2))
    assert observed(by_both, TARGET * 4, 3, used=0.95)[-1] < observed(by_memory, TARGET, 3, used=0.95)[-1]
    assert by_both.reason is LimitReason.OVER_TARGET


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_memory_is_a_number(bad):
    with pytest.raises(ValueError, match="used"):
        PidBatch().note_memory(bad)
