"""Where items are encoded beside the steps, and when they are done."""

from __future__ import annotations

import pytest

from vllm_omni_sched.sim.engine.lane import SimLane
from vllm_omni_sched.sim.kernel import Simulator


class Run:
    """A lane whose items take as many seconds as they have embeddings."""

    def __init__(self, places: int) -> None:
        self.sim = Simulator()
        self.done: list[tuple[str, float, float]] = []
        self.lane = SimLane(self.sim, lambda _, embeds: float(embeds), self._encoded, places)

    def _encoded(self, content: str, ticket: int, seconds: float, modality: str, embeds: int) -> None:
        self.done.append((content, self.sim.now, seconds))

    def submit(self, **items: int) -> Run:
        for content, embeds in items.items():
            self.lane.submit(content, 1, "image", embeds)
        return self


def test_one_place_does_one_after_the_other() -> None:
    run = Run(1).submit(a=4, b=2)
    assert (run.lane.working, run.lane.until) == (1, 4.0)
    run.sim.run()
    assert run.done == [("a", 4.0, 4.0), ("b", 6.0, 2.0)]
    assert (run.lane.working, run.lane.busy_seconds, run.lane.until) == (0, 6.0, 6.0)


def test_an_item_stays_with_the_place_that_was_to_finish_it_first_when_it_came() -> None:
    run = Run(2).submit(a=10, b=1, c=3, d=8)  # c behind b; d behind a would end later than behind b and c
    run.sim.run()
    assert run.done == [("b", 1.0, 1.0), ("c", 4.0, 3.0), ("a", 10.0, 10.0), ("d", 12.0, 8.0)]


def test_an_item_waits_for_a_quick_place_if_a_slow_one_would_take_longer() -> None:
    run = Run(2)
    run.lane.slow_last(0.1)
    run.submit(a=2, b=2)
    run.sim.run()  # a took 2 seconds, b on the slow place 20
    run.submit(c=2, d=2)
    run.sim.run()
    assert [(content, end) for content, end, _ in run.done[2:]] == [("c", 22.0), ("d", 24.0)]


def test_an_item_that_is_forgotten_is_no_longer_counted() -> None:
    run = Run(2).submit(a=4, b=3, c=9)  # c waits behind b
    run.lane.forget("c")
    run.submit(d=1)
    run.sim.run()
    assert run.done == [("b", 3.0, 3.0), ("a", 4.0, 4.0), ("d", 4.0, 1.0)]


def test_the_last_place_has_what_is_left_to_it() -> None:
    run = Run(2).submit(a=4, b=4)
    run.sim.at(1.0, run.lane.slow_last, 0.5)
    run.sim.at(3.0, run.lane.slow_last, 0.1)
    run.sim.at(8.0, run.lane.slow_last, 1.0)
    run.sim.run()
    # 1 second of 4 at full speed, 2 at half of it, 5 at a tenth: one and a half are left
    assert run.done == [("a", 4.0, 4.0), ("b", pytest.approx(9.5), pytest.approx(9.5))]


def test_a_speed_that_comes_between_two_items_holds_for_the_next() -> None:
    run = Run(1)
    run.lane.slow_last(0.5)
    run.submit(a=1)
    assert run.lane.until == 2.0
    run.sim.run()
    assert run.done == [("a", 2.0, 2.0)]


def test_a_dead_lane_forgets_all_and_can_begin_anew() -> None:
    run = Run(2).submit(a=4, b=4, c=4)
    run.sim.run(until=1.0)
    run.lane.slow_last(0.5)
    run.lane.kill()
    run.submit(d=2, e=2)
    run.sim.run()
    assert run.done == [("d", 3.0, 2.0), ("e", 3.0, 2.0)]
    assert run.lane.working == 0
