"""The decoder processes of all kinds: they are started when there is work, and replaced when they end.

Used by one thread. It tracks which decoders are idle, which task each has, and which video each has open; the next
assignments are made by `vllm_omni_sched.video.share`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.video import messages, wire
from vllm_omni_sched.video.job import Answer, Job, Lost, Task
from vllm_omni_sched.video.kinds import Kind
from vllm_omni_sched.video.messages import Failure
from vllm_omni_sched.video.process import Process, Settings
from vllm_omni_sched.video.share import Seat

logger = get_logger(__name__)

_START_SECONDS = 60.0
_GRACE_SECONDS = 0.1  # between the last message of a process and its end
TRIES = 2  # most processes that may die of one task, and most failed starts in a row of a kind


@dataclass(eq=False)
class Place:
    """One decoder: its process, if it runs, and its task."""

    number: int
    kind: Kind
    device: int
    process: Process | None = None
    ready: bool = False
    job: Job | None = None
    task: Task | None = None
    opened: Job | None = None
    since: float = 0.0  # when the process was started


class Team:
    """Runs the processes of all decoders.

    Args:
        kinds: kinds of decoders.
        settings: settings of their processes.
        watch: called with the place of a process that was started.
        unwatch: called with the place before its process ends.
        restarted: called with a kind when a process of it has ended unexpectedly.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        settings: Settings,
        watch: Callable[[Place], None],
        unwatch: Callable[[Place], None],
        restarted: Callable[[str], None],
    ) -> None:
        self._settings, self._watch, self._unwatch, self._restarted = settings, watch, unwatch, restarted
        devices = [(kind, device) for kind in kinds for device in kind.devices]
        self.places = [Place(number, kind, device) for number, (kind, device) in enumerate(devices)]
        self.sizes = {kind.name: len(kind.devices) for kind in kinds}
        self.missing: tuple[str, ...] = ()
        self._failed_starts: dict[str, int] = {}
        self._problems: dict[str, str] = {}

    @property
    def idle(self) -> list[Seat]:
        """The decoders that can begin a task now."""
        idle = (one for one in self.places if one.ready and one.task is None)
        return [Seat(one.number, one.kind.name, one.opened.key if one.opened else None) for one in idle]

    @property
    def busy(self) -> int:
        return sum(one.task is not None for one in self.places)

    @property
    def running(self) -> int:
        return sum(one.process is not None for one in self.places)

    @property
    def lent(self) -> int:
        """The total of threads beyond one that tasks have."""
        return sum(one.task.given - 1 for one in self.places if one.task is not None)

    def start(self, kind: str, now: float) -> str:
        """Start the processes of a kind that do not run; return why none of them runs, or "".

        A kind whose processes fail to start several times in a row is given up, until the next call for it.
        """
        ours = [place for place in self.places if place.kind.name == kind]
        for place in ours:
            if place.process is not None and not place.ready and now - place.since > _START_SECONDS:
                self.stop(place)
        problem = self._problems.get(kind, "")
        if self._failed_starts.get(kind, 0) < TRIES:
            for place in ours:
                if place.process is None:
                    try:
                        place.process = Process(place.kind, place.device, self._settings)
                    except Exception as error:  # noqa: BLE001 - any error is reported to the loads
                        problem = str(error) or type(error).__name__
                        break
                    place.since = now
                    self._watch(place)
        if any(place.process is not None for place in ours):
            return ""
        self._failed_starts.pop(kind, None)
        return problem or f"there is no decoder of kind {kind!r}"

    def give(self, place: Place, job: Job, task: Task, now: float) -> Lost | None:
        """Assign a task to an idle decoder; return the lost task if its process has ended and it is not retried."""
        assert place.process is not None
        if not place.process.alive:  # it ended while it was idle, so the task is not the cause
            self.stop(place)
            job.left[task.number] = task
            return None
        place.job, place.task, task.started = job, task, now
        try:
            if task.needs_open and place.opened is not job:
                assert job.opening is not None
                place.process.send(*job.opening)
                place.opened = job
            place.process.send(*task.message(task.number, task.given))
        except OSError:
            return self.ended(place)
        return None

    def read(self, place: Place) -> tuple[Job, Answer | Lost] | None:
        """Read a message of a process; return None if it concerns no job."""
        assert place.process is not None
        try:
            received = place.process.channel.receive()
        except Exception as error:  # noqa: BLE001 - a compromised process may send anything
            if not isinstance(error, EOFError):
                logger.warning(
                    "unreadable message from decoder %d (%s); restarting it", place.number, type(error).__name__
                )
            return self._of_job(place)
        if received is None:
            return None
        message, fds = received
        ready = isinstance(message, messages.Ready)
        if len(fds) > isinstance(message, messages.Indexed) or (ready and place.ready):
            wire.close_all(fds)
            return self._of_job(place)  # only an index has a descriptor, and a process is ready only once
        if ready:
            place.ready = True
            self._failed_starts.pop(place.kind.name, None)
            if message.missing and not self.missing:
                logger.warning(
                    "decoder processes run without %s, which this system lacks; see `vllm-omni-sched doctor`",
                    ", ".join(message.missing),
                )
                self.missing = message.missing
            return None
        if isinstance(message, messages.Failed) and message.failure is Failure.START:
            self._problems[place.kind.name] = message.message
            return self._of_job(place)
        job, task = place.job, place.task
        if task is None or job is None or not _answers(message, task):
            wire.close_all(fds)
            return self._of_job(place)  # an answer to no task
        place.job = place.task = None
        return job, Answer(task, message, fds)

    def _of_job(self, place: Place) -> tuple[Job, Answer | Lost] | None:
        job, lost = place.job, self.ended(place)
        return (job, lost) if job is not None and lost is not None else None

    def ended(self, place: Place) -> Lost | None:
        """Clean up after a process that has ended, or must end; return its task if it is not retried.

        A task that is retried goes back to its job.
        """
        job, task = place.job, place.task
        how = self.stop(place, _GRACE_SECONDS)
        if not task or not job:
            return None
        task.deaths += 1
        if task.deaths < TRIES:
            job.left[task.number] = task
            return None
        return Lost(task, None, f"the decoder process {how}")

    def stop(self, place: Place, grace_seconds: float = 0.0) -> str:
        """End a process, unless it ends by itself soon; return how it ended, as text."""
        if place.process is None:
            return "was not running"
        started = place.ready
        self._unwatch(place)
        how = place.process.end(grace_seconds)
        place.process, place.ready, place.job, place.task, place.opened = None, False, None, None, None
        kind = place.kind.name
        if not started:
            self._failed_starts[kind] = self._failed_starts.get(kind, 0) + 1
            self._problems.setdefault(kind, f"the process {how} before it was ready")
        self._restarted(kind)
        return how

    def drop(self, place: Place) -> None:
        """End a process whose state is unknown, ignoring all errors."""
        process = place.process
        with contextlib.suppress(Exception):
            self._unwatch(place)
        place.process, place.ready, place.job, place.task, place.opened = None, False, None, None, None
        if process is not None:
            with contextlib.suppress(Exception):
                process.end()
        self._restarted(place.kind.name)

    def forget(self, job: Job) -> None:
        """End a job: stop processes that work on it, and close its video in the others."""
        for place in self.places:
            if place.job is job:
                self.stop(place)
            elif place.opened is job and place.process is not None:
                place.opened = None
                try:
                    place.process.send(messages.Close())
                except OSError:
                    self.stop(place)

    def close(self) -> None:
        """End all processes."""
        for place in self.places:
            if place.process is not None:
                self._unwatch(place)
                place.process.end()
                place.process, place.ready = None, False


def _answers(message: messages.Indexed | messages.Done | messages.Failed, task: Task) -> bool:
    """Return whether a message is an answer to this task."""
    right = messages.Done if task.needs_open else messages.Indexed
    return message.task == task.number and isinstance(message, (right, messages.Failed))
