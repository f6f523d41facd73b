"""The thread between loads and decoders: takes tasks, assigns them to decoders, and delivers the answers."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Sequence

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.errors import DecoderError
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.video.job import Closed, Job, Lost, Task
from vllm_omni_sched.video.kinds import Kind
from vllm_omni_sched.video.messages import Failure
from vllm_omni_sched.video.observe import Observer
from vllm_omni_sched.video.process import Settings
from vllm_omni_sched.video.share import PieceLeft, Share, VideoWork
from vllm_omni_sched.video.team import Place, Team

logger = get_logger(__name__)

CLOSED = "video decoding was closed, because its server or process is shutting down"
_BROKEN = "decoding this video failed with an internal error; see the server's log"
_LOOK_SECONDS = 1.0  # between checks of processes that do not become ready


class Bell:
    """Wakes the dispatcher's thread; any thread may ring it, and its descriptor lives as long as this object."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is full, so that the thread wakes anyway
            os.eventfd_write(self._fd, 1)

    def quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        os.close(self._fd)


class Dispatcher:
    """Runs the decoders of a `Team` by the plans of a `Share`, on a thread that starts with the first task.

    Args:
        bell: wakes the thread.
        reclaim: called whenever the thread is awake; returns whether memory is left to free later.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        settings: Settings,
        share: Share,
        clock: Clock,
        observer: Observer,
        bell: Bell,
        reclaim: Callable[[], bool],
    ) -> None:
        self._share, self._clock, self._observer, self._reclaim = share, clock, observer, reclaim
        self._selector = selectors.DefaultSelector()
        self._bell = bell
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._load = (0, 0)
        self._warm = False  # whether memory of frames is left to free later
        self.team = Team(kinds, settings, self._watch, self._unwatch, observer.restarted)
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
            task.posted = now

        def add() -> None:
            self._jobs[job.key] = job
            job.left.update((task.number, task) for task in tasks)

        self._post(add, job)

    def finish(self, job: Job) -> None:
        """End a job: drop its tasks, and end processes that still work on it, because they may hang."""
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
            self._bell.ring()
        if thread is not None:
            thread.join()
        self._selector.close()

    def abandon(self) -> None:
        """Close descriptors in a forked child; the thread and the processes belong to the parent."""
        if not self._closed:
            self._closed = True
            self._lock = threading.Lock()
            self._selector.close()
            for place in self.team.places:
                if place.process is not None:
                    place.process.channel.close()
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
            self._bell.ring()

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(_LOOK_SECONDS if self._jobs or self._warm else None):
                    if isinstance(key.data, Place):
                        self._hear(key.data)
                    else:
                        self._bell.quiet()
                while self._commands:
                    self._do(*self._commands.popleft())
                self._do(self._take_back)
                self._do(self._give_out)
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
        while self._commands:
            self._do(*self._commands.popleft())
        for job in self._jobs.values():
            job.events.put(Closed(CLOSED))
        self.team.close()

    def _do(self, what: Callable[[], None], job: Job | None = None) -> None:
        """Run a command; if it fails, end the jobs concerned and go on, because the thread serves all videos."""
        try:
            what()
        except Exception:
            logger.exception("video decoding: an internal error; the videos concerned fail, decoding goes on")
            for one in [job] if job is not None else [one for one in self._jobs.values() if one.left]:
                self._break(one)

    def _take_back(self) -> None:
        self._warm = self._reclaim()

    def _break(self, job: Job) -> None:
        """End a job that can get no more answers."""
        job.left.clear()
        job.events.put(Closed(_BROKEN))

    def _start(self, kind: str) -> None:
        if problem := self.team.start(kind, self._clock()):
            self._fail(kind, problem)

    def _watch(self, place: Place) -> None:
        assert place.process is not None
        self._selector.register(place.process.fileno(), selectors.EVENT_READ, place)

    def _unwatch(self, place: Place) -> None:
        assert place.process is not None
        self._selector.unregister(place.process.fileno())

    def _hear(self, place: Place) -> None:
        job = place.job
        try:
            said = self.team.read(place) if place.process is not None else None
        except Exception:
            logger.exception("reading from decoder %d failed; terminating its process", place.number)
            self.team.drop(place)
            if job is not None:
                self._break(job)
            return
        if said is not None:
            said[0].events.put(said[1])

    def _finish(self, job: Job) -> None:
        try:
            self.team.forget(job)
        except Exception:
            logger.exception("closing a video in its decoder processes failed; terminating them")
            for place in self.team.places:
                if job in (place.job, place.opened):
                    self.team.drop(place)
        job.release()
        self._jobs.pop(job.key, None)

    def _give_out(self) -> None:
        """Assign tasks until no decoder is idle, or no task is left."""
        while left := self._left():
            for kind in {work.kind: len(work.left) for work in left}:
                if problem := self.team.start(kind, self._clock()):
                    self._fail(kind, problem)
            takes = self._share.plan(left, self.team.idle, self.team.sizes, self.team.lent, self._clock())
            if not takes:
                break
            for take in takes:
                job = self._jobs[take.video]
                task = job.left.pop(take.piece)
                task.given = take.threads
                self._give(self.team.places[take.decoder], job, task)
        if (load := (self.team.busy, self.team.running)) != self._load:
            self._load = load
            self._observer.busy(*load)

    def _give(self, place: Place, job: Job, task: Task) -> None:
        try:
            lost = self.team.give(place, job, task, self._clock())
        except Exception:
            logger.exception("sending a task to decoder %d failed; terminating its process", place.number)
            self.team.drop(place)
            self._break(job)
            return
        if lost is not None:
            job.events.put(lost)

    def _left(self) -> list[VideoWork]:
        work = []
        for job in self._jobs.values():
            for kind in dict.fromkeys(task.kind for task in job.left.values()):
                pieces = (PieceLeft(t.number, t.cost, t.threads) for t in job.left.values() if t.kind == kind)
                work.append(VideoWork(job.key, job.arrival, job.sla, kind, tuple(pieces)))
        return work

    def _fail(self, kind: str, problem: str) -> None:
        for job in self._jobs.values():
            for task in [task for task in job.left.values() if task.kind == kind]:
                del job.left[task.number]
                job.events.put(Lost(task, Failure.START, f"no decoder of kind {kind!r} can be started: {problem}"))
