"""Paths end with their process, and a forked child does not inherit them."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Ending(Protocol):
    """What has an end."""

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Lifetimes:
    """Of paths of one kind: closed when the process ends, abandoned in its forked children.

    Those made later are closed sooner: a kind that stands on another makes its own after it.
    """

    def __init__(self) -> None:
        self._there: weakref.WeakSet[Ending] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._abandon)
        atexit.register(self._close)

    def add(self, path: Ending) -> None:
        """See to this one, too, as long as it is there."""
        self._there.add(path)

    def _abandon(self) -> None:
        for path in list(self._there):
            path.abandon()

    def _close(self) -> None:
        for path in list(self._there):
            path.close()
