"""The rules of `MediaTurns`, one after the other."""

from __future__ import annotations

from vllm_omni_sched.preprocess.arrivals import MediaTurns

PACE, LATE, LONG = 0.005, 0.002, 0.2


def turns(count: int, now: float = 0.0) -> MediaTurns:
    found = MediaTurns(PACE, LATE, LONG)
    for number in range(count):
        found.add(number, now)
    return found


def test_nothing_waits() -> None:
    assert turns(0).begin(0.0, 0.0) is None


def test_rule_1_in_order_of_arrival_one_at_a_time() -> None:
    waiting = turns(3)
    assert [waiting.begin(at, 0.0) for at in (0.0, 1.0, 2.0, 3.0)] == [0, 1, 2, None]
    assert len(waiting) == 0


def test_rule_2_not_before_the_pace() -> None:
    waiting = turns(2)
    assert waiting.begin(1.0 / 64, 0.0) == 0
    assert waiting.begin(1.0 / 64 + PACE - 1e-6, 0.0) is None
    assert waiting.begin(1.0 / 64 + PACE + 1e-6, 0.0) == 1


def test_rule_2_not_while_the_loop_is_late() -> None:
    waiting = turns(1)
    assert waiting.begin(0.1, LATE + 1e-6) is None
    assert waiting.begin(0.1, LATE) == 0


def test_rule_3_one_that_waited_long_begins_at_once() -> None:
    waiting = turns(2)
    waiting.add(2, 0.1)
    assert waiting.begin(LONG, 1.0) == 0
    assert waiting.begin(LONG, 1.0) == 1
    assert waiting.begin(LONG, 1.0) is None


def test_a_removed_request_does_not_begin() -> None:
    waiting = turns(2)
    waiting.remove(0)
    waiting.remove(7)
    assert len(waiting) == 1
    assert waiting.begin(0.0, 0.0) == 1
