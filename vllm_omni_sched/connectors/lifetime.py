"""Closing of transports when their process ends, and abandoning of them in forked children."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Ending(Protocol):
    """Object that can be closed or abandoned."""

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Lifetimes:
    """Set of the transports of one kind: closed when the process ends, and abandoned in its forked children.

    Instances of this class that are created later are closed sooner: a kind of transport that uses another one must
    create its instance after that one.
    """

    def __init__(self) -> None:
        self._there: weakref.WeakSet[Ending] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._abandon)
        atexit.register(self._close)

    def add(self, transport: Ending) -> None:
        """Track a transport as long as it exists."""
        self._there.add(transport)

    def _abandon(self) -> None:
        for transport in list(self._there):
            transport.abandon()

    def _close(self) -> None:
        for transport in list(self._there):
            transport.close()
