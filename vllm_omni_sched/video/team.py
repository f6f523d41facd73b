"""All decoders: their processes, which are started when there is work, and started again when they end.

Used by one thread. It knows who is idle, who works on what, and which video a process has open; what comes next is
`vllm_omni_sched.video.share`'s to say.
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
_GRACE_SECONDS = 0.1  # between the last word of a process and its end
TRIES = 2  # processes that may die of a task, and of which one kind may fail to start in a row


@dataclass(eq=False)
class Place:
    """One decoder: its process, if it runs, and what it does."""

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
    """
    Args:
        kinds: of decoders.
        settings: of their processes.
        watch: called with a process that was started, and ``unwatch`` before it ends.
        restarted: called with a kind when a process of it has ended that should not have.
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
        """Decoders that could begin now."""
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
        """Threads beyond one that tasks have."""
        return sum(one.task.given - 1 for one in self.places if one.task is not None)

    def start(self, kind: str, now: float) -> str:
        """Start what does not run of a kind; why none of it does, or "".

        A kind whose processes have failed to start several times in a row is given up, until it is asked for again.
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
                    except Exception as error:  # noqa: BLE001 - whatever it is, loads are to hear of it
                        problem = str(error) or type(error).__name__
                        break
                    place.since = now
                    self._watch(place)
        if any(place.process is not None for place in ours):
            return ""
        self._failed_starts.pop(kind, None)
        return problem or f"there is none of kind {kind!r}"

    def give(self, place: Place, job: Job, task: Task, now: float) -> Lost | None:
        """Let an idle decoder do a task; what has become of it when its process has ended meanwhile."""
        assert place.process is not None
        if not place.process.alive:  # ended while it was idle: the task has no part in it
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
        """What a process has said; None when that is of no interest to a job."""
        assert place.process is not None
        try:
            received = place.process.channel.receive()
        except Exception as error:  # noqa: BLE001 - who has been taken over may say anything
            if not isinstance(error, EOFError):
                logger.warning("a decoder process says what nobody can read: %s", type(error).__name__)
            return self._of_job(place)
        if received is None:
            return None
        message, fds = received
        ready = isinstance(message, messages.Ready)
        if len(fds) > isinstance(message, messages.Indexed) or (ready and place.ready):
            wire.close_all(fds)
            return self._of_job(place)  # only an index has a descriptor, and nobody is ready twice
        if ready:
            place.ready = True
            self._failed_starts.pop(place.kind.name, None)
            if message.missing and not self.missing:
                logger.warning("decoder processes go without %s: this system has none", ", ".join(message.missing))
                self.missing = message.missing
            return None
        if isinstance(message, messages.Failed) and message.failure is Failure.START:
            self._problems[place.kind.name] = message.message
            return self._of_job(place)
        job, task = place.job, place.task
        if task is None or job is None or not _answers(message, task):
            wire.close_all(fds)
            return self._of_job(place)  # it says what it was not asked
        place.job = place.task = None
        return job, Answer(task, message, fds)

    def _of_job(self, place: Place) -> tuple[Job, Answer | Lost] | None:
        job, lost = place.job, self.ended(place)
        return (job, lost) if job is not None and lost is not None else None

    def ended(self, place: Place) -> Lost | None:
        """See to a process that has ended, or has to; what has become of its task, if that is not to be tried again.

        A task that is to be tried again is left to its job.
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
        """End a process, whatever it is at, unless it ends by itself soon; how it ended."""
        if place.process is None:
            return "was not there"
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
        """End a process of which nothing can be told any more, not even how it ends."""
        process = place.process
        with contextlib.suppress(Exception):
            self._unwatch(place)
        place.process, place.ready, place.job, place.task, place.opened = None, False, None, None, None
        if process is not None:
            with contextlib.suppress(Exception):
                process.end()
        self._restarted(place.kind.name)

    def forget(self, job: Job) -> None:
        """A job has ended: what works on it is stopped, and who has its video open closes it."""
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
    """Whether it is an answer to this task."""
    right = messages.Done if task.needs_open else messages.Indexed
    return message.task == task.number and isinstance(message, (right, messages.Failed))
