"""The thread between loads and decoders: takes tasks, assigns them to decoders, and delivers the answers."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Sequence

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import DecoderError
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.video.pool.assignment import PieceAssigner, WaitingPiece, WaitingVideo
from vllm_omni_sched.video.pool.decoder_pool import DecoderPool, DecoderSlot
from vllm_omni_sched.video.pool.job import Job, JobClosed, LostTask, Task
from vllm_omni_sched.video.pool.kinds import DecoderKind
from vllm_omni_sched.video.pool.messages import Failure
from vllm_omni_sched.video.pool.process import ProcessSettings
from vllm_omni_sched.video.results import Observer

logger = get_logger(__name__)

CLOSED = "video decoding was closed, because its server or process is shutting down"
_INTERNAL_ERROR = "decoding this video failed with an internal error; see the server's log"
_CHECK_SECONDS = 1.0  # between checks of processes that do not become ready


class Waker:
    """Wakes the dispatcher's thread; any thread may call `wake`. Its descriptor lives as long as this object."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is full, so that the thread wakes anyway
            os.eventfd_write(self._fd, 1)

    def reset(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        os.close(self._fd)


class Dispatcher:
    """Runs the decoders of a `DecoderPool` by the plans of a `PieceAssigner`.

    Its thread starts with the first task.

    Args:
        waker: wakes the thread.
        reclaim: called whenever the thread is awake; returns whether memory is left to free later.
    """

    def __init__(
        self,
        kinds: Sequence[DecoderKind],
        settings: ProcessSettings,
        assigner: PieceAssigner,
        clock: Clock,
        observer: Observer,
        waker: Waker,
        reclaim: Callable[[], bool],
    ) -> None:
        self._assigner, self._clock, self._observer, self._reclaim = assigner, clock, observer, reclaim
        self._selector = selectors.DefaultSelector()
        self._bell = waker
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._reported_load = (0, 0)
        self._memory_to_free = False  # whether memory of frames is left to free later
        self.pool = DecoderPool(kinds, settings, self._watch, self._unwatch, observer.restarted)
        self._jobs: dict[int, Job] = {}
        self._commands: deque[tuple[Callable[[], None], Job | None]] = deque()
        self._lock = threading.Lock()  # guards the two below
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Return whether it accepts tasks."""
        return not self._closed

    def start(self, kind: str) -> None:
        """Start the decoders of a kind before the first video.

        Raises:
            DecoderError: closed.
        """
        self._post(lambda: self._start(kind))

    def add(self, job: Job, tasks: Sequence[Task]) -> None:
        """Queue the tasks of a job; answers arrive as the job's events, one for each task.

        Raises:
            DecoderError: closed.
        """
        now = self._clock()
        for task in tasks:
            task.queued_at = now

        def add() -> None:
            self._jobs[job.key] = job
            job.waiting_tasks.update((task.number, task) for task in tasks)

        self._post(add, job)

    def finish(self, job: Job) -> None:
        """End a job: drop its tasks, and terminate processes that still work on it, because they may hang."""
        try:
            self._post(lambda: self._finish(job), job)
        except DecoderError:
            job.release()

    def close(self) -> None:
        """End all processes and the thread; jobs under way get an event. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
            self._bell.wake()
        if thread is not None:
            thread.join()
        self._selector.close()

    def abandon(self) -> None:
        """Close descriptors in a forked child; the thread and the processes belong to the parent."""
        if not self._closed:
            self._closed = True
            self._lock = threading.Lock()
            self._selector.close()
            for slot in self.pool.slots:
                if slot.process is not None:
                    slot.process.channel.close()
            for job in self._jobs.values():
                while job.fds:
                    os.close(job.fds.pop())

    def _post(self, command: Callable[[], None], job: Job | None = None) -> None:
        """Pass a command to the thread; ``job`` is ended if the command fails."""
        with self._lock:
            if self._closed:
                raise DecoderError(CLOSED)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="omni-sched-video", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise DecoderError(f"no video can be decoded, because no thread can be started: {error}") from None
                self._thread = thread
            self._commands.append((command, job))
            self._bell.wake()

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(_CHECK_SECONDS if self._jobs or self._memory_to_free else None):
                    if isinstance(key.data, DecoderSlot):
                        self._read_message(key.data)
                    else:
                        self._bell.reset()
                while self._commands:
                    self._run_guarded(*self._commands.popleft())
                self._run_guarded(self._reclaim_memory)
                self._run_guarded(self._assign_tasks)
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
        while self._commands:
            self._run_guarded(*self._commands.popleft())
        for job in self._jobs.values():
            job.events.put(JobClosed(CLOSED))
        self.pool.close()

    def _run_guarded(self, what: Callable[[], None], job: Job | None = None) -> None:
        """Run a command; if it fails, end the jobs concerned and go on, because the thread serves all videos."""
        try:
            what()
        except Exception:
            failing = [job] if job is not None else [one for one in self._jobs.values() if one.waiting_tasks]
            logger.exception(
                "video decoding: internal error; %d of the %d videos being decoded fail with HTTP 500, decoding goes "
                "on for the others and for new videos",
                len(failing),
                len(self._jobs),
            )
            for one in failing:
                self._fail_job(one)

    def _reclaim_memory(self) -> None:
        self._memory_to_free = self._reclaim()

    def _fail_job(self, job: Job) -> None:
        """End a job that can get no more answers."""
        job.waiting_tasks.clear()
        job.events.put(JobClosed(_INTERNAL_ERROR))

    def _start(self, kind: str) -> None:
        if problem := self.pool.start(kind, self._clock()):
            self._fail_tasks(kind, problem)

    def _watch(self, slot: DecoderSlot) -> None:
        assert slot.process is not None
        self._selector.register(slot.process.fileno(), selectors.EVENT_READ, slot)

    def _unwatch(self, slot: DecoderSlot) -> None:
        assert slot.process is not None
        self._selector.unregister(slot.process.fileno())

    def _read_message(self, slot: DecoderSlot) -> None:
        job = slot.job
        try:
            received = self.pool.read(slot) if slot.process is not None else None
        except Exception:
            logger.exception(
                "video decoding: internal error while reading from decoder process %d; its process is terminated and "
                "replaced, and the video it was decoding fails",
                slot.number,
            )
            self.pool.discard(slot)
            if job is not None:
                self._fail_job(job)
            return
        if received is not None:
            received[0].events.put(received[1])

    def _finish(self, job: Job) -> None:
        try:
            self.pool.end_job(job)
        except Exception:
            logger.exception(
                "video decoding: internal error while closing a video; the decoder processes that have it open are "
                "terminated and replaced"
            )
            for slot in self.pool.slots:
                if job in (slot.job, slot.opened):
                    self.pool.discard(slot)
        job.release()
        self._jobs.pop(job.key, None)

    def _assign_tasks(self) -> None:
        """Assign tasks until no decoder is idle, or no task is left."""
        while waiting := self._waiting_videos():
            for kind in dict.fromkeys(video.kind for video in waiting):
                if problem := self.pool.start(kind, self._clock()):
                    self._fail_tasks(kind, problem)
            assignments = self._assigner.plan(
                waiting, self.pool.idle, self.pool.sizes, self.pool.lent_threads, self._clock(), self.pool.links
            )
            if not assignments:
                break
            for assignment in assignments:
                job = self._jobs[assignment.video]
                task = job.waiting_tasks.pop(assignment.piece)
                task.threads = assignment.threads
                self._assign(self.pool.slots[assignment.decoder], job, task)
        if (load := (self.pool.busy, self.pool.running)) != self._reported_load:
            self._reported_load = load
            self._observer.busy(*load)

    def _assign(self, slot: DecoderSlot, job: Job, task: Task) -> None:
        try:
            lost = self.pool.assign(slot, job, task, self._clock())
        except Exception:
            logger.exception(
                "video decoding: internal error while sending a task to decoder process %d; its process is terminated "
                "and replaced, and the video of the task fails",
                slot.number,
            )
            self.pool.discard(slot)
            self._fail_job(job)
            return
        if lost is not None:
            job.events.put(lost)

    def _waiting_videos(self) -> list[WaitingVideo]:
        videos = []
        for job in self._jobs.values():
            tasks = job.waiting_tasks.values()
            for kind in dict.fromkeys(task.kind for task in tasks):
                pieces = (WaitingPiece(t.number, t.cost, t.max_threads, t.nbytes) for t in tasks if t.kind == kind)
                videos.append(WaitingVideo(job.key, job.arrival, job.sla, kind, tuple(pieces)))
        return videos

    def _fail_tasks(self, kind: str, problem: str) -> None:
        for job in self._jobs.values():
            for task in [task for task in job.waiting_tasks.values() if task.kind == kind]:
                del job.waiting_tasks[task.number]
                job.events.put(LostTask(task, Failure.START, f"no decoder of kind {kind!r} can be started: {problem}"))
