"""A lane that is a thread of this process."""

import contextlib
import threading
from collections import deque
from typing import Any

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import LaneClosedError, LaneWorkError
from vllm_omni_sched.lanes.base import (
    CLOSED,
    CLOSED_BEFORE_DONE,
    Done,
    Job,
    Lane,
    Pacer,
    Pause,
    Work,
    checked_share,
    held_twice,
)


class ThreadLane(Lane):
    """Runs jobs in a thread, which shares the interpreter lock, and kernels' scratch memory, with its owner.

    A job that has started cannot be stopped: if it is cancelled, it runs to its end and is not reported.
    """

    def __init__(self, work: Work, capacity: int = 16) -> None:
        super().__init__(work, capacity)
        self._share = 1.0
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: str | None = None
        self._busy = False  # a job runs, cancelled or not
        self._ended: list[Done] = []
        self._held: set[str] = set()
        self._closed = False
        self._rest = threading.Event()  # set on close: the pacer does not rest any more
        self._thread = threading.Thread(target=self._run, name="omni-sched-lane", daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        return len(self._held)

    def submit(self, job: Job) -> bool:
        with self._lock:
            if self._closed:
                raise LaneClosedError(CLOSED)
            if job.key in self._held:
                raise ValueError(held_twice(job.key))
            if len(self._held) >= self.capacity:
                return False
            self._held.add(job.key)
            self._waiting.append(job)
            self._lock.notify_all()
            return True

    def cancel(self, key: str) -> bool:
        with self._lock:
            if key not in self._held:
                return False
            self._held.remove(key)
            self._waiting = deque(job for job in self._waiting if job.key != key)
            self._ended = [done for done in self._ended if done.key != key]
            if self._running == key:
                self._running = None
            return True

    def poll(self) -> list[Done]:
        with self._lock:
            ended, self._ended = self._ended, []
            self._held.difference_update(done.key for done in ended)
            return ended

    def wait(self, timeout: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: bool(self._ended), timeout)

    def set_share(self, share: float) -> None:
        self._share = checked_share(share)

    def drain(self, timeout: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting and self._running is None, timeout)

    def renew(self) -> None:
        with self._lock:
            self._held.clear()
            self._waiting.clear()
            self._ended.clear()
            self._running = None
            self._lock.wait_for(lambda: not self._busy)

    def close(self, timeout: float = 5.0) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._rest.set()
        self._thread.join(timeout)
        with self._lock:
            done = {done.key for done in self._ended}
            for key in sorted(self._held - done):
                self._ended.append(Done(key, error=LaneClosedError(CLOSED_BEFORE_DONE)))
            self._waiting.clear()
            self._running = None

    def _surroundings(self) -> contextlib.AbstractContextManager[None]:
        """Return the context manager in which the thread runs all its jobs."""
        return contextlib.nullcontext()

    def _do(self, payload: Any, pause: Pause) -> Any:
        """Run one job, on the thread."""
        return self._work(payload, pause)

    def _run(self) -> None:
        with self._surroundings():
            self._do_jobs()

    def _do_jobs(self) -> None:
        pacer = Pacer(lambda: self._share, monotonic_seconds, self._rest.wait)
        while self._do_next(pacer):
            pass

    def _do_next(self, pacer: Pacer) -> bool:
        """Wait for the next job, run it and report it; return False once the lane is closed.

        An idle lane is in here without a job, so that it keeps no payload and no result in memory.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return False
            job = self._waiting.popleft()
            self._running, self._busy = job.key, True
        started = monotonic_seconds()
        pacer.begin()
        try:
            done = Done(job.key, self._do(job.payload, pacer.pause))
        except Exception as error:  # noqa: BLE001 - any error is reported as the job's
            done = Done(job.key, error=LaneWorkError(f"{type(error).__name__}: {error}"))
        done = Done(job.key, done.result, done.error, monotonic_seconds() - started)
        with self._lock:
            self._busy = False
            # Another job may have been submitted under this key since this one was cancelled.
            if self._running == job.key and not self._closed:
                self._running = None
                self._ended.append(done)
            self._lock.notify_all()
        return True
