"""Several process lanes that work as one lane."""

import select
from collections.abc import Sequence

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import LaneClosedError
from vllm_omni_sched.lanes.base import CLOSED, Done, Job, Lane, checked_share, held_twice
from vllm_omni_sched.lanes.process import ProcessLane
from vllm_omni_sched.resource.engine.lane import LaneLoad, earliest, lanes_to_widen


class LanePool(Lane):
    """Runs as many jobs at a time as there are lanes; a job goes to the lane that will finish it first (`earliest`).

    Jobs of one lane run in the order of their `submit`, those of different lanes in any order. A lane that shares its
    processors with other work is slow: jobs queue behind those of a quick one as long as that is sooner.

    While the LLM computes nothing, a lane that alone has jobs may use the processors of all lanes (`lanes_to_widen`).

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
        self._loads = [LaneLoad() for _ in lanes]
        self._place_of: dict[str, tuple[int, float]] = {}  # job key -> lane that holds it, its size
        self._wide = [False] * len(lanes)
        self.llm_idle, self.sees_owner = False, False
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
        if job.key in self._place_of:
            raise ValueError(held_twice(job.key))
        open_ = [at for at, lane in enumerate(self.lanes) if lane.held < lane.capacity]
        if not open_:
            return False
        at = open_[earliest([self._loads[one] for one in open_], job.size)]
        self._widen(at)  # first, or the job could begin on too few processors, or too many
        if not self.lanes[at].submit(job):
            self._widen()
            return False
        self._place_of[job.key] = at, job.size
        self._loads[at].held += job.size
        return True

    def cancel(self, key: str) -> bool:
        if key not in self._place_of:
            return False
        at, _ = self._leave(key)
        return self.lanes[at].cancel(key)

    def poll(self) -> list[Done]:
        found = []
        for lane in self.lanes:
            for done in lane.poll():
                found.append(done)
                if done.key not in self._place_of:
                    continue  # submitted to the lane itself, before it joined the pool
                at, size = self._leave(done.key)
                if done.error is None:
                    self._loads[at].ended(size, done.seconds)
        return found

    def _leave(self, key: str) -> tuple[int, float]:
        at, size = self._place_of.pop(key)
        self._loads[at].left(size)
        self._widen()
        return at, size

    def _widen(self, *coming: int) -> None:
        """Tell the lanes which processors they may use; ``coming``: lanes that get one more job.

        A lane is told only what is new.
        """
        jobs = [coming.count(at) for at in range(len(self.lanes))]
        for at, _ in self._place_of.values():
            jobs[at] += 1
        wide = lanes_to_widen(jobs, llm_idle=self.llm_idle)
        for lane, before, after in zip(self.lanes, self._wide, wide, strict=True):
            if before != after:
                lane.set_wide(after)
        self._wide = wide

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

    def set_llm_idle(self, idle: bool) -> None:
        super().set_llm_idle(idle)
        self._widen()

    def drain(self, timeout: float) -> bool:
        end = monotonic_seconds() + timeout
        drained = [lane.drain(max(0.0, end - monotonic_seconds())) for lane in self.lanes]
        return all(drained)

    def renew(self) -> None:
        self._place_of.clear()
        self._wide = [False] * len(self.lanes)
        for lane, load in zip(self.lanes, self._loads, strict=True):
            load.held = 0.0
            lane.renew()

    def close(self, timeout: float = 5.0) -> None:
        self._closed = True
        end = monotonic_seconds() + timeout
        for lane in self.lanes:
            lane.close(max(0.0, end - monotonic_seconds()))
