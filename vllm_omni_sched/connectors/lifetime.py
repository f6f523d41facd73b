"""Closes paths when their process ends, and abandons them in forked children."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Ending(Protocol):
    """An object that can be closed or abandoned."""

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Lifetimes:
    """Tracks the paths of one kind, which are closed when the process ends, and abandoned in its forked children.

    Instances made later are closed sooner: a kind that uses another must make its instance after it.
    """

    def __init__(self) -> None:
        self._there: weakref.WeakSet[Ending] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._abandon)
        atexit.register(self._close)

    def add(self, path: Ending) -> None:
        """Track this path, too, as long as it exists."""
        self._there.add(path)

    def _abandon(self) -> None:
        for path in list(self._there):
            path.abandon()

    def _close(self) -> None:
        for path in list(self._there):
            path.close()
