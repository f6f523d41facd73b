"""A load as the decoders see it: its tasks, which wait or run, and the queue of their answers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.video.device_memory import DeviceRoom
from vllm_omni_sched.video.frame_memory import FrameBuffer
from vllm_omni_sched.video.pool.messages import Failure

_numbers = itertools.count(1)

Message = tuple[Any, tuple[int, ...]]
"""A message to a decoder, and its descriptors."""


@dataclass(eq=False)
class Task:
    """The work that one decoder does in one go.

    Attributes:
        message: returns the message to send, for the task's number and threads.
        kind: kind of decoders that may do it.
        cost: predicted seconds of one decoder.
        max_threads: most threads that may work on it.
        needs_open: whether the decoder must have opened the video.
        nbytes: bytes of frames that the decoder copies into the memory of a device; 0: they go to the host.
        crashes: number of processes that ended while they worked on it.
        threads: threads that work on it.
        queued_at, started_at: when it began to wait, and when a decoder last began it, in seconds.
    """

    message: Callable[[int, int], Message]
    kind: str
    cost: float
    max_threads: int = 1
    needs_open: bool = True
    nbytes: int = 0
    number: int = field(default_factory=lambda: next(_numbers))
    crashes: int = 0
    threads: int = 1
    queued_at: float = 0.0
    started_at: float = 0.0


class Answer(NamedTuple):
    """A decoder's answer to a task; the receiver must close the descriptors."""

    task: Task
    message: Any
    fds: list[int]


class LostTask(NamedTuple):
    """Reports a task that ended without an answer."""

    task: Task
    failure: Failure | None  # None: processes died while working on it
    message: str


class JobClosed(NamedTuple):
    """Marks the end of all events of a job, with the reason as text."""

    message: str


@dataclass(eq=False)
class Job:
    """Holds the tasks and events of one video's load.

    Attributes:
        key: unique.
        arrival: when it began, in seconds.
        events: `Answer`, `LostTask` and `JobClosed`, for the loading thread.
        open_message: message with which a decoder opens the video before its pieces, with descriptors.
        frames: memory for its frames, held here as long as a decoder may write to it.
        fds: descriptors to close at its end.
        waiting_tasks: tasks that no decoder has, by number.
    """

    arrival: float
    sla: SlaClass
    key: int = field(default_factory=lambda: next(_numbers))
    events: SimpleQueue[Answer | LostTask | JobClosed] = field(default_factory=SimpleQueue)
    open_message: Message | None = None
    frames: FrameBuffer | DeviceRoom | None = None
    fds: list[int] = field(default_factory=list)
    waiting_tasks: dict[int, Task] = field(default_factory=dict)

    def release(self) -> None:
        """Close its descriptors and drop its tasks; idempotent."""
        while self.fds:
            os.close(self.fds.pop())
        self.frames = None
        self.waiting_tasks.clear()
        while not self.events.empty():
            event = self.events.get()
            if isinstance(event, Answer):
                for fd in event.fds:
                    os.close(fd)
