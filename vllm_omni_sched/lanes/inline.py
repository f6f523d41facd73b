"""No lane at all: the work is done where it is handed in."""

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.errors import LaneClosedError, LaneWorkError
from vllm_omni_sched.lanes.base import Done, Job, Lane, Work, checked_share


class InlineLane(Lane):
    """Does each job in `submit`, and so blocks its owner: what is left when no other lane can be had."""

    def __init__(self, work: Work, capacity: int = 16) -> None:
        super().__init__(work, capacity)
        self._ended: list[Done] = []
        self._closed = False

    @property
    def held(self) -> int:
        return len(self._ended)

    def submit(self, job: Job) -> bool:
        if self._closed:
            raise LaneClosedError("the lane is closed")
        if any(done.key == job.key for done in self._ended):
            raise ValueError(f"job {job.key!r} is held by this lane already")
        if len(self._ended) >= self.capacity:
            return False
        started = monotonic_seconds()
        result, error = None, None
        try:
            result = self._work(job.payload, _no_pause)
        except Exception as problem:  # noqa: BLE001 - whatever it is, it is the job's
            error = LaneWorkError(f"{type(problem).__name__}: {problem}")
        self._ended.append(Done(job.key, result, error, monotonic_seconds() - started))
        return True

    def cancel(self, key: str) -> bool:
        before = len(self._ended)
        self._ended = [done for done in self._ended if done.key != key]
        return len(self._ended) < before

    def poll(self) -> list[Done]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout: float) -> bool:
        return bool(self._ended)

    def set_share(self, share: float) -> None:
        checked_share(share)

    def drain(self, timeout: float) -> bool:
        return True

    def close(self, timeout: float = 5.0) -> None:
        self._closed = True


def _no_pause() -> None:
    pass
