"""A lane without concurrency: jobs run where they are submitted."""

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import LaneClosedError, LaneWorkError
from vllm_omni_sched.lanes.base import CLOSED, Done, Job, Lane, Work, checked_share, held_twice, no_pause


class InlineLane(Lane):
    """Runs each job in `submit`, which blocks its owner; the fallback when no other lane is possible."""

    def __init__(self, work: Work, capacity: int = 16) -> None:
        super().__init__(work, capacity)
        self._ended: list[Done] = []
        self._closed = False

    @property
    def held(self) -> int:
        return len(self._ended)

    def submit(self, job: Job) -> bool:
        if self._closed:
            raise LaneClosedError(CLOSED)
        if any(done.key == job.key for done in self._ended):
            raise ValueError(held_twice(job.key))
        if len(self._ended) >= self.capacity:
            return False
        started = monotonic_seconds()
        result, error = None, None
        try:
            result = self._work(job.payload, no_pause)
        except Exception as problem:  # noqa: BLE001 - any error is reported as the job's
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

    def renew(self) -> None:
        self._ended.clear()

    def close(self, timeout: float = 5.0) -> None:
        self._closed = True
