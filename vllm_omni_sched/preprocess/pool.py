"""`PreprocessPool`, which runs jobs in processes forked from this one."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import (
    LaneError,
    PreprocessCancelledError,
    PreprocessDeadlineError,
    PreprocessError,
    PreprocessInputError,
    PreprocessProcessError,
    UnsupportedValueError,
)
from vllm_omni_sched.graph.order import INTERACTIVE, SlaClass
from vllm_omni_sched.lanes.fork_server import ForkServer
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.preprocess import messages, values
from vllm_omni_sched.preprocess.messages import Failure
from vllm_omni_sched.preprocess.options import (
    DEADLINE_SECONDS,
    MOST_WAITING,
    WORKER_MEMORY_BYTES,
    PreprocessOptions,
)
from vllm_omni_sched.preprocess.order import JobOrder, Outcome, Waiting
from vllm_omni_sched.preprocess.worker import WorkerSettings, release_sockets, serve
from vllm_omni_sched.video.pool.channel import Channel, close_all, closing_fd

logger = get_logger(__name__)

_ATTEMPTS = 2
_FAILED: dict[Failure, tuple[Outcome, type[PreprocessError]]] = {
    Failure.INPUT: (Outcome.BAD_INPUT, PreprocessInputError),
    Failure.UNSUPPORTED: (Outcome.UNSUPPORTED, UnsupportedValueError),
    Failure.MEMORY: (Outcome.MEMORY, PreprocessProcessError),
    Failure.INTERNAL: (Outcome.FAILED, PreprocessProcessError),
}


class Observer(Protocol):
    """Receives the events of the pool; called from several threads, must not block."""

    def started(self, waited_seconds: float) -> None:
        """Record that a job started after this wait."""

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """Record that a job ended; ``seconds``: time in the process, 0 if it was not done."""

    def state(self, busy: int, waiting: int, held_bytes: int) -> None:
        """Note how many processes work, how many jobs wait, and how large the results are that were not taken yet."""

    def restarted(self) -> None:
        """Record that a process ended and was replaced."""


class NullObserver:
    """An observer that ignores all events."""

    def started(self, waited_seconds: float) -> None: ...

    def ended(self, outcome: Outcome, seconds: float) -> None: ...

    def state(self, busy: int, waiting: int, held_bytes: int) -> None: ...

    def restarted(self) -> None: ...


class Job:
    """A job of a pool.

    Attributes:
        future: done when the job has ended; its result says nothing: `take` returns the value or raises.
    """

    def __init__(
        self, pool: PreprocessPool, task: int, payload: values.Encoded, sla: SlaClass, arrival: float, deadline: float
    ) -> None:
        self._pool, self.task, self.payload, self.sla = pool, task, payload, sla
        self.arrival, self.deadline = arrival, deadline
        self.future: Future[None] = Future()
        self.attempts = 0
        self.held_bytes = 0
        self.slot: _Slot | None = None
        self.value: Any = None
        self.error: PreprocessError | None = None
        self.cancelled = False

    def take(self) -> Any:
        """Wait for the end of the job, and return its result; once.

        Raises:
            PreprocessError: the job failed.
        """
        self.future.result()
        self._pool._release(self)
        if self.error is not None:
            raise self.error
        value, self.value = self.value, None
        return value

    def cancel(self) -> None:
        """End the job; what it was working on is lost. A job that has ended gives its memory back. Idempotent."""
        self._pool._cancel(self)


class PreprocessPool:
    """Runs jobs in processes, which are forked from this one by its constructor.

    A process that dies is replaced, and its job runs once more in another. A job that is cancelled or late while it
    runs is ended with its process.

    Args:
        work: what the processes do, see `WorkerSettings`; the state that it closes over is that of now.
        options: at least one process.

    Raises:
        LaneError: this platform cannot fork such processes.
    """

    def __init__(
        self,
        work: Callable[[Any, Callable[[], int]], Any],
        options: PreprocessOptions,
        *,
        clock: Clock = monotonic_seconds,
        observer: Observer | None = None,
    ) -> None:
        self.options, self._clock, self._observer = options, clock, observer or NullObserver()
        self._order = JobOrder(options.max_bytes, MOST_WAITING, options.max_wait_seconds)
        self._jobs: dict[int, Job] = {}
        self._tasks = itertools.count(1)
        self._changed = threading.Condition()
        self._held_bytes = self._running = 0
        self._processors = len(os.sched_getaffinity(0))
        self._closed = False
        settings = WorkerSettings(work, options.nice, WORKER_MEMORY_BYTES, options.max_bytes)
        self._slots = [_Slot(self, settings) for _ in range(options.processes)]
        self._threads = [
            threading.Thread(target=self._run, args=(slot,), name=f"omni-sched-preprocess-{at}", daemon=True)
            for at, slot in enumerate(self._slots)
        ]
        for thread in self._threads:  # after all forks
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes that work."""
        return [slot.fork_server.pid for slot in self._slots]

    @property
    def held_bytes(self) -> int:
        """Return the size of the results that were not taken yet."""
        return self._held_bytes

    def submit(self, payload: Any, sla: SlaClass = INTERACTIVE, *, needed: bool = False) -> Job | None:
        """Add a job; None if too many wait.

        Args:
            needed: the caller's thread waits for it, and it goes first.

        Raises:
            UnsupportedValueError: the payload contains something that is not sent to another process.
            PreprocessProcessError: the pool is closed.
        """
        encoded = values.encode(payload)
        now = self._clock()
        with self._changed:
            if self._closed:
                raise PreprocessProcessError("the preprocessing pool is closed")
            job = Job(self, next(self._tasks), encoded, sla, now, now + DEADLINE_SECONDS[sla.name])
            if not self._order.add(Waiting(job.task, sla, now, job.deadline, needed)):
                return None
            self._jobs[job.task] = job
            self._notify()
        return job

    def close(self, timeout: float = 5.0) -> None:
        """End all processes; jobs under way fail. Results that were taken stay valid. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            waiting = [job for job in self._jobs.values() if self._order.remove(job.task)]
            for slot in self._slots:
                slot.kill(slot.task)
            self._notify()
        for job in waiting:
            self._end(job, Outcome.CLOSED, PreprocessProcessError("the preprocessing pool was closed"))
        for thread in self._threads:
            thread.join(timeout)
        for slot in self._slots:
            slot.close(timeout)

    # -- a thread for each process ------------------------------------------

    def _run(self, slot: _Slot) -> None:
        while (job := self._take(slot)) is not None:
            try:
                outcome, error, seconds = slot.run(job)
            except LaneError as gone:  # no process can be started any more
                outcome, error, seconds = Outcome.FAILED, PreprocessProcessError(str(gone)), 0.0
            with self._changed:
                self._running -= 1
                job.slot = None
                if job.cancelled:
                    outcome, error, job.value = Outcome.CANCELLED, _cancelled(), None
                again = outcome is Outcome.DIED and job.attempts < _ATTEMPTS and not self._closed
                if again:
                    waiting = Waiting(job.task, job.sla, job.arrival, job.deadline, needed=True)
                    self._order.add(waiting)
                self._notify()
            if not again:
                self._end(job, outcome, error, seconds)

    def _take(self, slot: _Slot) -> Job | None:
        """Wait for a job that starts now; None when the pool is closed."""
        while True:
            with self._changed:
                now = self._clock()
                late = [self._jobs[task] for task in self._order.expired(now)]
                if not late:
                    if self._closed:
                        return None
                    task, _ = self._order.next(now, self._held_bytes, self._running)
                    if task is not None:
                        job = self._jobs[task]
                        job.slot, job.attempts = slot, job.attempts + 1
                        self._running += 1
                        self._observer.started(now - job.arrival)
                        self._notify()
                        return job
                    until = self._order.next_deadline()
                    self._changed.wait(None if until is None else max(0.0, until - now) + 0.001)
            for job in late:
                self._end(job, Outcome.DEADLINE, self._late(job))

    def _late(self, job: Job) -> PreprocessDeadlineError:
        return PreprocessDeadlineError(
            f"the items of a request of class {job.sla.name} were not preprocessed within "
            f"{DEADLINE_SECONDS[job.sla.name]:g} s: give the server more preprocessing `processes`"
        )

    def _end(self, job: Job, outcome: Outcome, error: PreprocessError | None, seconds: float = 0.0) -> None:
        with self._changed:
            if self._jobs.pop(job.task, None) is None:
                return
            job.error = error
            if error is None:
                self._held_bytes += job.held_bytes
                self._order.ended(job.held_bytes)
            else:
                job.held_bytes = 0
            self._notify()
        self._observer.ended(outcome, seconds)
        job.future.set_result(None)

    def _release(self, job: Job) -> None:
        with self._changed:
            self._held_bytes -= job.held_bytes
            job.held_bytes = 0
            self._notify()

    def _cancel(self, job: Job) -> None:
        with self._changed:
            if job.slot is not None:
                job.cancelled = True
                job.slot.kill(job.task)
            waited = self._order.remove(job.task)
        if waited:
            self._end(job, Outcome.CANCELLED, _cancelled())
        elif job.future.done():
            job.value = None
            self._release(job)

    def _notify(self) -> None:
        threads = self._order.threads(self._processors, len(self._slots), self._running)
        for slot in self._slots:
            slot.fork_server.threads = threads
        self._observer.state(self._running, len(self._order), self._held_bytes)
        self._changed.notify_all()


def _cancelled() -> PreprocessCancelledError:
    return PreprocessCancelledError("the request was cancelled while its items were preprocessed")


class _Slot:
    """A process of the pool, and its replacements."""

    def __init__(self, pool: PreprocessPool, settings: WorkerSettings) -> None:
        self._pool = pool
        self.fork_server = ForkServer(partial(serve, settings), release_sockets)
        self.task = 0  # the job that the process works on
        self._killing = threading.Lock()
        self._channel: Channel | None = self._spawned()

    def _spawned(self) -> Channel:
        return Channel(self.fork_server.spawn(), messages.from_worker)

    def kill(self, task: int) -> None:
        """Kill the process if it works on this job; the thread that waits for its answer replaces it."""
        with self._killing:
            if task and self.task == task:
                self.fork_server.kill()

    def close(self, timeout: float) -> None:
        """End the process and its fork server; its thread has ended."""
        if self._channel is not None:
            self._channel.close()
        self.fork_server.close(timeout)

    def _work_on(self, task: int) -> None:
        with self._killing:
            self.task = task

    def run(self, job: Job) -> tuple[Outcome, PreprocessError | None, float]:
        """Run a job, and return how it ended, its error, and the time in the process.

        Raises:
            LaneError: no process can be started.
        """
        if self._channel is None:
            self._channel = self._spawned()
        self._work_on(job.task)
        try:
            with closing_fd(values.sealed_file(job.payload)) as fd:
                self._channel.send(messages.Work(job.task, job.payload.tree), [fd], wait=True)
            answer, fds = self._answer(job)
            self._work_on(0)
        except (EOFError, ConnectionError):
            return self._died(job)
        except TimeoutError:
            self.kill(job.task)
            self._replace()
            return Outcome.DEADLINE, self._pool._late(job), 0.0
        except (OSError, ValueError) as error:
            self.kill(job.task)
            self._replace()
            return Outcome.FAILED, PreprocessProcessError(f"exchanging data with a process failed: {error}"), 0.0
        try:
            if isinstance(answer, messages.Failed):
                outcome, kind = _FAILED[answer.failure]
                return outcome, kind(_text(answer)), 0.0
            memory = values.map_sealed(fds[0], self._pool.options.max_bytes)
            job.value, job.held_bytes = values.decode(answer.tree, memory), len(memory)
            return Outcome.DONE, None, answer.seconds
        except (OSError, ValueError, IndexError) as error:
            return Outcome.FAILED, PreprocessProcessError(f"the result of a process cannot be read: {error}"), 0.0
        finally:
            close_all(fds)

    def _answer(self, job: Job) -> tuple[Any, list[int]]:
        assert self._channel is not None
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while True:
            left = job.deadline - self._pool._clock()
            if left <= 0:
                raise TimeoutError
            if poll.poll(min(left * 1000, 60_000) + 1) and (received := self._channel.receive()) is not None:
                if received[0].task == job.task:
                    return received
                close_all(received[1])

    def _died(self, job: Job) -> tuple[Outcome, PreprocessError | None, float]:
        how = self._replace()
        if job.cancelled:
            return Outcome.CANCELLED, _cancelled(), 0.0
        if self._pool._closed:
            return Outcome.CLOSED, PreprocessProcessError("the preprocessing pool was closed"), 0.0
        logger.warning(
            "A preprocessing process %s while it prepared the items of a request; it is replaced, and %s.",
            how,
            "another one tries again" if job.attempts < _ATTEMPTS else "the request fails, as this is its second one",
        )
        return (
            Outcome.DIED,
            PreprocessProcessError(f"two preprocessing processes died over the items of this request; the last {how}"),
            0.0,
        )

    def _replace(self) -> str:
        """Wait for the end of the process and start another; return how it ended."""
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        how = self.fork_server.end_of_last()
        self._work_on(0)
        if not self._pool._closed:
            self._pool._observer.restarted()
            with contextlib.suppress(LaneError):  # `run` tries again
                self._channel = self._spawned()
        return how


def _text(answer: messages.Failed) -> str:
    if answer.failure is Failure.MEMORY:
        return f"a preprocessing process has not enough memory for the items of this request; {answer.text}"
    return answer.text
