"""What a replica has left, kept up to date, is what a look at each of its requests gives."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.pipeline.work_left import WorkLeft


class Walked:
    """The same by a walk over all requests."""

    def __init__(self) -> None:
        self.speed = 1.0
        self.now = 0.0
        self.running: dict[str, list[float]] = {}  # cost, work done on it, seconds it had

    def passes(self, now: float) -> None:
        for one in self.running.values():
            share = max(now - self.now, 0.0) / len(self.running)
            one[1] += share * self.speed
            one[2] += share
        self.now = now

    def remaining_seconds(self) -> float:
        return sum(max(cost - done, 0.1 * cost) for cost, done, _ in self.running.values())

    def next_end_seconds(self) -> float:
        left = [cost - done for cost, done, _ in self.running.values() if cost - done > 1e-9]
        return min(left, default=math.inf) * len(self.running) / self.speed if left else math.inf


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "take", "speed", "look"]),
        st.sampled_from("abcdefgh"),
        st.integers(1, 40),  # of cost, and of speed
        st.integers(0, 30),  # time that passes
    ),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=200, deadline=None)
def test_it_is_what_a_walk_gives(events: list[tuple[str, str, int, int]]) -> None:
    ours, walked, now = WorkLeft[str](), Walked(), 0.0
    for what, key, amount, passes in events:
        now += passes / 8
        walked.passes(now)
        if what == "add":
            ours.add(key, amount / 4, now)
            walked.running[key] = [amount / 4, 0.0, 0.0]
        elif what == "take":
            had = ours.take(key, now)
            gone = walked.running.pop(key, None)
            assert had is None if gone is None else had == pytest.approx(gone[2], abs=1e-9)
        elif what == "speed":
            ours.remaining_seconds(now)
            ours.speed = walked.speed = amount / 10
        assert len(ours) == len(walked.running)
        assert ours.remaining_seconds(now) == pytest.approx(walked.remaining_seconds(), abs=1e-6)
        found, expected = ours.next_end_seconds(now), walked.next_end_seconds()
        if found > 1e-6:  # else rounding decides whether one has ended
            assert found == pytest.approx(expected, abs=1e-6)


class Counted(float):
    """A number that counts who looks at it."""

    looks = 0

    def _look(self) -> float:
        Counted.looks += 1
        return float(self)

    def __add__(self, other: float) -> float:
        return self._look() + other

    def __radd__(self, other: float) -> float:
        return other + self._look()

    def __sub__(self, other: float) -> float:
        return self._look() - other

    def __rsub__(self, other: float) -> float:
        return other - self._look()

    def __mul__(self, other: float) -> float:
        return self._look() * other

    __rmul__ = __mul__


@pytest.mark.parametrize("running", [8, 1024])
def test_a_look_does_not_touch_the_requests_that_run(running: int) -> None:
    work: WorkLeft[int] = WorkLeft()
    for n in range(running):
        work.add(n, Counted(50.0 + n), 0.0)
    Counted.looks = 0
    for n in range(200):
        work.remaining_seconds(n / 100)
        work.next_end_seconds(n / 100)
    assert Counted.looks == 0
    work.remaining_seconds(1e9)  # all of them turn, once
    assert Counted.looks == running
    work.remaining_seconds(2e9)
    assert Counted.looks == running


def test_requests_that_have_left_take_no_room() -> None:
    work: WorkLeft[int] = WorkLeft()
    walked = Walked()
    for number in range(1000):
        now = float(number)
        walked.passes(now)
        work.add(number, 5.0, now)
        walked.running[str(number)] = [5.0, 0.0, 0.0]
        if number >= 4:
            work.take(number - 4, now)
            del walked.running[str(number - 4)]
    assert len(work._ends) < 40
    assert len(work._turns) < 40
    walked.passes(1000.0)
    assert work.remaining_seconds(1000.0) == pytest.approx(walked.remaining_seconds())
