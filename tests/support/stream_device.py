"""A device with streams, for machines without one: the fake stands where CUDA does, below `StreamLane`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class OutOfMemory(RuntimeError):
    """Raised by this device when it has no memory left."""


@dataclass(eq=False)
class Point:
    """A mark on the stream of one thread; the device is past it when ``reached`` is set."""

    stream: str
    device: HostDevice
    reached: threading.Event = field(default_factory=threading.Event)

    def synchronize(self) -> None:
        self.device.note("synchronize", self.device.marks.index(self))
        assert self.reached.wait(20.0), "nobody let the device go on"


class HostDevice:
    """Work is done by the processor, at once; when it counts as done is up to the test.

    ``log`` holds what was asked, as (stream, verb, argument): marks and what follows them by their number.
    """

    out_of_memory: type[BaseException] = OutOfMemory

    def __init__(self, *, held_up: bool = False) -> None:
        self.held_up = held_up
        self.marks: list[Point] = []
        self.log: list[tuple[str, str, Any]] = []
        self._lock = threading.RLock()
        self._stream = threading.local()

    def note(self, verb: str, argument: Any) -> None:
        with self._lock:
            self.log.append((self._current(), verb, argument))

    def _current(self) -> str:
        return getattr(self._stream, "name", "owner")

    @contextlib.contextmanager
    def lane_stream(self) -> Iterator[None]:
        self._stream.name = "lane"
        yield
        del self._stream.name

    def mark(self) -> Point:
        with self._lock:
            point = Point(self._current(), self)
            if point.stream == "owner" or not self.held_up:
                point.reached.set()
            self.marks.append(point)
            self.note("mark", len(self.marks) - 1)
            return point

    def follow(self, mark: Any, tensors: Any) -> None:
        self.note("follow", (self.marks.index(mark), tensors))

    def empty_cache(self) -> None:
        self.note("empty_cache", None)

    def go_on(self) -> None:
        """Let the device catch up, and never fall behind again."""
        with self._lock:
            self.held_up = False
            for point in self.marks:
                point.reached.set()

    def wait_for_marks(self, stream: str, number: int) -> None:
        """Wait until so many marks were made on a stream."""
        until = time.monotonic() + 60
        while len(self.asked(stream, "mark")) < number:
            assert time.monotonic() < until, f"{stream} has {len(self.asked(stream, 'mark'))} marks, not {number}"
            time.sleep(0.001)

    def asked(self, stream: str, *verbs: str) -> list[tuple[str, Any]]:
        """Return what was asked from one stream, in order."""
        with self._lock:
            return [(verb, argument) for where, verb, argument in self.log if where == stream and verb in verbs]
