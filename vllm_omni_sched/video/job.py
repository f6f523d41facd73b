"""One load, as the team sees it: tasks that wait or run, and where their answers go."""

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
"""What to send to a decoder, and its descriptors."""


@dataclass(eq=False)
class Task:
    """What one decoder does in one go.

    Attributes:
        message: what to send, by the task's number and threads.
        kind: of decoders that may do it.
        cost: predicted seconds of one decoder.
        threads: most that may work on it.
        needs_open: whether the decoder has to know the video first.
        deaths: processes that ended while they were at it.
        given: threads that work on it.
        posted, started: when it began to wait, and when a decoder began with it last.
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
    """A decoder has answered; descriptors are the reader's to close."""

    task: Task
    message: Any
    fds: list[int]


class Lost(NamedTuple):
    """A task has come to nothing, without an answer."""

    task: Task
    failure: Failure | None  # None: processes died of it
    message: str


class Closed(NamedTuple):
    """Nothing comes any more, and why, for people."""

    message: str


@dataclass(eq=False)
class Job:
    """A load.

    Attributes:
        key: unique.
        arrival: when it began, in seconds.
        events: `Answer`, `Lost` and `Closed`, for the thread that loads.
        opening: what a decoder needs to know of the video before pieces of it, with descriptors.
        room: of its frames; theirs as long as a decoder writes to it.
        fds: closed when nobody needs them any more.
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
        """Close what it has open; may be called twice."""
        while self.fds:
            os.close(self.fds.pop())
        self.room = None
        self.left.clear()
        while not self.events.empty():
            event = self.events.get()
            if isinstance(event, Answer):
                for fd in event.fds:
                    os.close(fd)
