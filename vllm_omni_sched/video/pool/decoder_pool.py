"""The decoder processes of all kinds: they are started when there is work, and replaced when they end.

Used by one thread. It tracks which decoders are idle, which task each has, and which video each has open; the next
assignments are made by `vllm_omni_sched.video.pool.assignment`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.video.pool import messages
from vllm_omni_sched.video.pool.assignment import IdleDecoder
from vllm_omni_sched.video.pool.channel import close_all
from vllm_omni_sched.video.pool.job import Answer, Job, LostTask, Task
from vllm_omni_sched.video.pool.kinds import DecoderKind
from vllm_omni_sched.video.pool.messages import Failure
from vllm_omni_sched.video.pool.process import DecoderProcess, ProcessSettings

logger = get_logger(__name__)

_START_SECONDS = 60.0
_GRACE_SECONDS = 0.1  # between the last message of a process and its end
TRIES = 2  # most processes that may die of one task, and most failed starts in a row of a kind


@dataclass(eq=False)
class DecoderSlot:
    """One decoder: its process, if it runs, and its task.

    Attributes:
        number: position of this slot in the pool.
        device: GPU of the process, or `kinds.NO_DEVICE`.
        ready: whether the process has reported that it waits for tasks.
        job, task: what the process is working on.
        opened: job whose video the process has open.
        started_at: when the process was started, in seconds.
        link_bytes_per_second: speed of its device's copies into the memory of frames on a device, as it was measured.
    """

    number: int
    kind: DecoderKind
    device: int
    process: DecoderProcess | None = None
    ready: bool = False
    job: Job | None = None
    task: Task | None = None
    opened: Job | None = None
    started_at: float = 0.0
    link_bytes_per_second: float = 0.0

    def clear(self) -> None:
        """Forget the process, which has ended."""
        self.process, self.ready, self.job, self.task, self.opened = None, False, None, None, None
        self.link_bytes_per_second = 0.0


class DecoderPool:
    """Runs the processes of all decoders.

    Args:
        kinds: kinds of decoders.
        settings: settings of their processes.
        watch: called with the slot of a process that was started.
        unwatch: called with the slot before its process ends.
        restarted: called with a kind when a process of it has ended unexpectedly.
    """

    def __init__(
        self,
        kinds: Sequence[DecoderKind],
        settings: ProcessSettings,
        watch: Callable[[DecoderSlot], None],
        unwatch: Callable[[DecoderSlot], None],
        restarted: Callable[[str], None],
    ) -> None:
        self._settings, self._watch, self._unwatch, self._restarted = settings, watch, unwatch, restarted
        devices = [(kind, device) for kind in kinds for device in kind.devices]
        self.slots = [DecoderSlot(number, kind, device) for number, (kind, device) in enumerate(devices)]
        self.sizes = {kind.name: len(kind.devices) for kind in kinds}
        self._warned_of_sandbox = False
        self._failed_starts: dict[str, int] = {}  # in a row, by kind
        self._problems: dict[str, str] = {}  # why processes of a kind do not start

    @property
    def idle(self) -> list[IdleDecoder]:
        """Return the decoders that can begin a task now."""
        idle = (slot for slot in self.slots if slot.ready and slot.task is None)
        return [
            IdleDecoder(
                slot.number, slot.kind.name, slot.opened.key if slot.opened else None, slot.link_bytes_per_second
            )
            for slot in idle
        ]

    @property
    def links(self) -> dict[str, list[float]]:
        """Return the speeds of copies into the memory of frames on a device, of all decoders that run, by kind.

        That of a process that is still starting is unknown, and infinite until then.
        """
        links: dict[str, list[float]] = {}
        for slot in self.slots:
            if slot.process is not None:
                links.setdefault(slot.kind.name, []).append(slot.link_bytes_per_second if slot.ready else math.inf)
        return links

    @property
    def busy(self) -> int:
        """Return the number of decoders that have a task."""
        return sum(slot.task is not None for slot in self.slots)

    @property
    def running(self) -> int:
        """Return the number of processes that run."""
        return sum(slot.process is not None for slot in self.slots)

    @property
    def lent_threads(self) -> int:
        """Return the total of threads beyond one that tasks have."""
        return sum(slot.task.threads - 1 for slot in self.slots if slot.task is not None)

    def start(self, kind: str, now: float) -> str:
        """Start the processes of a kind that do not run; return why none of them runs, or "".

        A kind whose processes fail to start several times in a row is given up, until the next call for it.
        """
        of_kind = [slot for slot in self.slots if slot.kind.name == kind]
        for slot in of_kind:
            if slot.process is not None and not slot.ready and now - slot.started_at > _START_SECONDS:
                self.stop(slot)
        problem = self._problems.get(kind, "")
        if self._failed_starts.get(kind, 0) < TRIES:
            for slot in of_kind:
                if slot.process is None:
                    try:
                        slot.process = DecoderProcess(slot.kind, slot.device, self._settings)
                    except Exception as error:  # noqa: BLE001 - any error is reported to the loads
                        problem = str(error) or type(error).__name__
                        break
                    slot.started_at = now
                    self._watch(slot)
        if any(slot.process is not None for slot in of_kind):
            return ""
        self._failed_starts.pop(kind, None)
        return problem or f"there is no decoder of kind {kind!r}"

    def assign(self, slot: DecoderSlot, job: Job, task: Task, now: float) -> LostTask | None:
        """Assign a task to an idle decoder; return the lost task if its process has ended and it is not retried."""
        assert slot.process is not None
        if not slot.process.alive:  # it ended while it was idle, so the task is not the cause
            self.stop(slot)
            job.waiting_tasks[task.number] = task
            return None
        slot.job, slot.task, task.started_at = job, task, now
        try:
            if task.needs_open and slot.opened is not job:
                assert job.open_message is not None
                slot.process.send(*job.open_message)
                slot.opened = job
            slot.process.send(*task.message(task.number, task.threads))
        except OSError:
            return self.replace(slot)
        return None

    def read(self, slot: DecoderSlot) -> tuple[Job, Answer | LostTask] | None:
        """Read a message of a process; return None if it concerns no job."""
        assert slot.process is not None
        try:
            received = slot.process.channel.receive()
        except EOFError:
            return self._replaced(slot)
        except Exception as error:  # noqa: BLE001 - a compromised process may send anything
            logger.warning(
                "video decoding: unreadable message from decoder process %d (%s); it is terminated and replaced",
                slot.number,
                type(error).__name__,
            )
            return self._replaced(slot)
        if received is None:
            return None
        message, fds = received
        is_ready = isinstance(message, messages.Ready)
        if len(fds) > isinstance(message, messages.Indexed) or (is_ready and slot.ready):
            close_all(fds)
            return self._replaced(slot)  # only an index has a descriptor, and a process is ready only once
        if is_ready:
            slot.ready, slot.link_bytes_per_second = True, message.link_bytes_per_second
            self._failed_starts.pop(slot.kind.name, None)
            if message.missing and not self._warned_of_sandbox:
                logger.warning(
                    "video decoding: decoder processes run without %s, which this system lacks, and so a video that "
                    "exploits a codec can do more harm; `vllm-omni-sched doctor` tells what each part prevents",
                    ", ".join(message.missing),
                )
                self._warned_of_sandbox = True
            return None
        if isinstance(message, messages.Failed) and message.failure is Failure.START:
            self._problems[slot.kind.name] = message.message
            return self._replaced(slot)
        job, task = slot.job, slot.task
        if task is None or job is None or not _answers(message, task):
            close_all(fds)
            return self._replaced(slot)  # an answer to no task
        slot.job = slot.task = None
        return job, Answer(task, message, fds)

    def _replaced(self, slot: DecoderSlot) -> tuple[Job, LostTask] | None:
        """Clean up after a process as `replace`; return the lost task together with its job."""
        job, lost = slot.job, self.replace(slot)
        return (job, lost) if job is not None and lost is not None else None

    def replace(self, slot: DecoderSlot) -> LostTask | None:
        """Clean up after a process that has ended, or must end; return its task if it is not retried.

        A task that is retried goes back to its job.
        """
        job, task = slot.job, slot.task
        how = self.stop(slot, _GRACE_SECONDS)
        if not task or not job:
            return None
        task.crashes += 1
        if task.crashes < TRIES:
            job.waiting_tasks[task.number] = task
            return None
        return LostTask(task, None, f"the decoder process {how}")

    def stop(self, slot: DecoderSlot, grace_seconds: float = 0.0) -> str:
        """End a process, unless it ends by itself soon; return how it ended, as text."""
        if slot.process is None:
            return "was not running"
        was_ready = slot.ready
        self._unwatch(slot)
        how = slot.process.end(grace_seconds)
        slot.clear()
        kind = slot.kind.name
        if not was_ready:
            self._failed_starts[kind] = self._failed_starts.get(kind, 0) + 1
            self._problems.setdefault(kind, f"the process {how} before it was ready")
        self._restarted(kind)
        return how

    def discard(self, slot: DecoderSlot) -> None:
        """End a process whose state is unknown, ignoring all errors."""
        process = slot.process
        with contextlib.suppress(Exception):
            self._unwatch(slot)
        slot.clear()
        if process is not None:
            with contextlib.suppress(Exception):
                process.end()
        self._restarted(slot.kind.name)

    def end_job(self, job: Job) -> None:
        """End a job: stop processes that work on it, and close its video in the others."""
        for slot in self.slots:
            if slot.job is job:
                self.stop(slot)
            elif slot.opened is job and slot.process is not None:
                slot.opened = None
                try:
                    slot.process.send(messages.Close())
                except OSError:
                    self.stop(slot)

    def close(self) -> None:
        """End all processes."""
        for slot in self.slots:
            if slot.process is not None:
                self._unwatch(slot)
                slot.process.end()
                slot.process, slot.ready = None, False


def _answers(message: messages.Indexed | messages.Done | messages.Failed, task: Task) -> bool:
    """Return whether a message is an answer to this task."""
    right = messages.Done if task.needs_open else messages.Indexed
    return message.task == task.number and isinstance(message, (right, messages.Failed))
