"""A load from the view of the decoders: tasks that wait or run, and the queue for their answers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.video.frames import Room
from vllm_omni_sched.video.messages import Failure

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
        threads: most threads that may work on it.
        needs_open: whether the decoder must have opened the video.
        deaths: number of processes that ended while they worked on it.
        given: threads that work on it.
        posted, started: when it began to wait, and when a decoder last began it.
    """

    message: Callable[[int, int], Message]
    kind: str
    cost: float
    threads: int = 1
    needs_open: bool = True
    number: int = field(default_factory=lambda: next(_numbers))
    deaths: int = 0
    given: int = 1
    posted: float = 0.0
    started: float = 0.0


class Answer(NamedTuple):
    """A decoder's answer to a task; the receiver must close the descriptors."""

    task: Task
    message: Any
    fds: list[int]


class Lost(NamedTuple):
    """A task that ended without an answer."""

    task: Task
    failure: Failure | None  # None: processes died while working on it
    message: str


class Closed(NamedTuple):
    """The end of a job's events, with the reason as text."""

    message: str


@dataclass(eq=False)
class Job:
    """A load of one video.

    Attributes:
        key: unique.
        arrival: when it began, in seconds.
        events: `Answer`, `Lost` and `Closed`, for the loading thread.
        opening: message with which a decoder opens the video before its pieces, with descriptors.
        room: room for its frames, held here as long as a decoder may write to it.
        fds: descriptors to close at its end.
    """

    arrival: float
    sla: SlaClass
    key: int = field(default_factory=lambda: next(_numbers))
    events: SimpleQueue[Answer | Lost | Closed] = field(default_factory=SimpleQueue)
    opening: Message | None = None
    room: Room | None = None
    fds: list[int] = field(default_factory=list)
    left: dict[int, Task] = field(default_factory=dict)

    def release(self) -> None:
        """Close its descriptors and drop its tasks; idempotent."""
        while self.fds:
            os.close(self.fds.pop())
        self.room = None
        self.left.clear()
        while not self.events.empty():
            event = self.events.get()
            if isinstance(event, Answer):
                for fd in event.fds:
                    os.close(fd)
