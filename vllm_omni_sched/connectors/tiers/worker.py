"""Thread that moves messages in the background, and yields to calls of `get`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


PATIENCE_SECONDS = 0.05  # receivers that never stop asking do not stop moves


class GetsFirst:
    """Precedence of the gets of this process over moves.

    1. The mover gives way before each message.
    2. It then waits until no get runs, at most `PATIENCE_SECONDS`.
    3. A move that has begun is not stopped: a get waits for one message at most.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0

    @contextmanager
    def getting(self) -> Iterator[None]:
        """Mark a get as running for the block."""
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def give_way(self) -> None:
        """Wait until no get runs, for a bounded time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, PATIENCE_SECONDS)

    def forget_locks(self) -> None:
        """Reset the state in a forked child, where other threads may have held the lock."""
        self._changed = threading.Condition()
        self._running = 0


LONGEST_REST = 1.0  # seconds after a failure


class Worker:
    """Thread that calls a function when woken, and again after the number of seconds that the function returns.

    The thread starts when it is first woken. Exceptions of the function do not end it.

    Args:
        work: the function; returns the seconds until its next call, None to wait until woken.
        rest_seconds: shortest time between two calls.
    """

    def __init__(self, work: Callable[[], float | None], rest_seconds: float) -> None:
        self._work, self._rest = work, rest_seconds
        self._event, self._closed = threading.Event(), threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.failures = 0

    def wake(self) -> None:
        """Wake the thread; start it if necessary."""
        if not self._event.is_set():
            self._event.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._closed.is_set():
                    self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """End the thread after its current work."""
        with self._starting:
            self._closed.set()
        self._event.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        again: float | None = None
        while True:
            if again is None:
                self._event.wait()
            self._event.clear()
            if self._closed.is_set():
                return
            try:
                again = self._work()
            except Exception:
                self.failures += 1
                logger.exception("moving messages between tiers failed; trying again in %g s", LONGEST_REST)
                again = LONGEST_REST
            if self._closed.wait(self._rest if again is None else again):  # whoever wakes it
                return
