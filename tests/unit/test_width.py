"""A job asks, slice by slice, whether it may use all processors, and its time counts by their number."""

from __future__ import annotations

from vllm_omni_sched.lanes.width import Widening, Width


class Lane:
    """A lane of one processor out of three, with a clock."""

    def __init__(self) -> None:
        self.now, self.wanted = 0.0, False
        self.used: list[bool] = []
        self.width = Width(Widening(self.used.append, 3.0), lambda: self.wanted, lambda: self.now)

    def slice(self, seconds: float) -> None:
        self.now += seconds
        self.width.next_slice()


def test_the_word_of_the_owner_counts_from_the_next_slice_on():
    lane = Lane()
    lane.width.begin()
    lane.wanted = True
    assert lane.used == [False]
    lane.slice(1.0)
    lane.wanted = False
    lane.slice(1.0)
    assert lane.used == [False, True, False]


def test_time_on_all_processors_counts_by_their_number():
    lane = Lane()
    lane.width.begin()
    lane.slice(4.0)
    lane.wanted = True
    lane.slice(8.0)
    lane.now += 0.5
    assert lane.width.end() == 2 * 0.5  # 0.5 s on three processors are 1.5 s on one


def test_a_lane_without_more_processors_is_never_asked():
    width = Width(None, lambda: 1 / 0, lambda: 1 / 0)
    width.begin()
    width.next_slice()
    assert width.end() == 0.0
