"""Lock per name: one thread at a time works on a name, while others work on other names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class KeyedLock:
    """Base class of shared records: one lock that is held briefly, and locks of names, held while bytes move."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._busy: set[bytes] = set()  # names that are locked

    @contextmanager
    def alone(self, name: bytes, wait: bool = True) -> Iterator[bool]:
        """Lock a name for the block; yields False if it is locked and ``wait`` is false."""
        with self._lock:
            while (busy := name in self._busy) and wait:
                self._lock.wait()
            if not busy:
                self._busy.add(name)
        try:
            yield not busy
        finally:
            if not busy:
                with self._lock:
                    self._busy.discard(name)
                    self._lock.notify_all()

    def forget_locks(self) -> None:
        """Reset the locks in a forked child, where other threads may have held them."""
        self._lock = threading.Condition()
        self._busy = set()
