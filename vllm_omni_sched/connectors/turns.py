"""Books that several threads keep: one at a time with messages of a name, while others go on with other names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """What such books inherit: their lock, which is held for moments, and turns, which last as long as bytes move."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._busy: set[bytes] = set()  # names with which somebody is at work

    @contextmanager
    def alone(self, name: bytes, wait: bool = True) -> Iterator[bool]:
        """Nobody else does anything with messages of that name meanwhile; False when somebody does, and not to wait."""
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
        """In a forked child: somebody else may have held them."""
        self._lock = threading.Condition()
        self._busy = set()
