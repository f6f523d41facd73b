"""Gives receivers precedence over moves of messages in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 0.05  # receivers that never stop asking do not stop moves


class GetsFirst:
    """Keeps account of the gets of this process.

    1. Who moves messages gives way before each message.
    2. It then waits until no get runs, at most `PATIENCE_SECONDS`.
    3. What has begun is not stopped: a get waits for one message at most.
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
