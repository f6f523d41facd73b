"""Several process lanes that work as one lane."""

import select
from collections.abc import Sequence

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import LaneClosedError
from vllm_omni_sched.lanes.base import CLOSED, Done, Job, Lane, checked_share, held_twice
from vllm_omni_sched.lanes.process import ProcessLane


class LanePool(Lane):
    """Runs as many jobs at a time as there are lanes; a job goes to the first of the lanes that hold fewest jobs.

    Jobs of one lane run in the order of their `submit`, those of different lanes in any order.

    Args:
        lanes: the lanes, the fastest first; the pool closes them.

    Raises:
        ValueError: ``lanes`` is empty.
    """

    def __init__(self, lanes: Sequence[ProcessLane]) -> None:
        if not lanes:
            raise ValueError("a pool of lanes needs at least one lane")
        self.lanes = tuple(lanes)
        self.capacity = sum(lane.capacity for lane in lanes)
        self._lane_of: dict[str, ProcessLane] = {}  # job key -> lane that holds it
        self._closed = False

    @property
    def restarts(self) -> int:  # type: ignore[override]
        """Return the number of times that a process of these lanes died and was replaced."""
        return sum(lane.restarts for lane in self.lanes)

    @property
    def held(self) -> int:
        return sum(lane.held for lane in self.lanes)

    def submit(self, job: Job) -> bool:
        if self._closed:
            raise LaneClosedError(CLOSED)
        if job.key in self._lane_of:
            raise ValueError(held_twice(job.key))
        for lane in sorted(self.lanes, key=lambda lane: lane.held):
            if lane.submit(job):
                self._lane_of[job.key] = lane
                return True
        return False

    def cancel(self, key: str) -> bool:
        lane = self._lane_of.pop(key, None)
        return lane is not None and lane.cancel(key)

    def poll(self) -> list[Done]:
        found = [done for lane in self.lanes for done in lane.poll()]
        for done in found:
            self._lane_of.pop(done.key, None)
        return found

    def wait(self, timeout: float) -> bool:
        end = monotonic_seconds() + timeout
        while True:
            if any(lane.wait(0.0) for lane in self.lanes):
                return True
            left = end - monotonic_seconds()
            if self._closed or left <= 0:
                return False
            select.select(self.lanes, [], [], left)

    def set_share(self, share: float) -> None:
        checked_share(share)
        for lane in self.lanes:
            lane.set_share(share)

    def drain(self, timeout: float) -> bool:
        end = monotonic_seconds() + timeout
        drained = [lane.drain(max(0.0, end - monotonic_seconds())) for lane in self.lanes]
        return all(drained)

    def close(self, timeout: float = 5.0) -> None:
        self._closed = True
        end = monotonic_seconds() + timeout
        for lane in self.lanes:
            lane.close(max(0.0, end - monotonic_seconds()))
