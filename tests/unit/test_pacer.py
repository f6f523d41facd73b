"""The rests of a lane between slices of work."""

from __future__ import annotations

from vllm_omni_sched.lanes.base import Pacer


class Lane:
    """A lane's times: of the clock, slept, and spent waiting for others."""

    def __init__(self, share: float) -> None:
        self.now = self.slept = self.idle = 0.0
        self.pacer = Pacer(lambda: share, lambda: self.now, self.sleep, lambda: self.idle)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.idle += seconds


def test_it_rests_in_proportion_to_its_work():
    lane = Lane(0.25)
    lane.work(0.125)
    lane.pacer.pause()
    assert lane.slept == 3 * 0.125


def test_time_before_a_job_and_time_spent_waiting_for_others_are_no_work():
    lane = Lane(0.25)
    lane.work(8.0)
    lane.pacer.begin()
    for _ in range(3):
        lane.work(0.0625)
        lane.wait(0.5)
        lane.work(0.0625)
        lane.pacer.pause()
    assert lane.slept == 3 * 3 * 0.125


def test_the_whole_device_is_used_without_rest():
    lane = Lane(1.0)
    lane.work(0.125)
    lane.pacer.pause()
    assert lane.slept == 0.0
