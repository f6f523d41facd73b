"""Waiting for messages of an edge without asking for each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence


class Arrivals(ABC):
    """Tells which messages of one edge may be there, and sleeps until more may be.

    Read `ticket`, look, and `wait` with that ticket: a message that comes in between ends the wait. The look after that
    needs only what came since that ticket. Any thread may call.
    """

    @abstractmethod
    def ticket(self) -> Hashable:
        """Return a value that differs once a message of the edge was shown; others may change it, too."""

    @abstractmethod
    def may_be_there(self, keys: Sequence[str], since: Hashable = None) -> list[bool]:
        """Return, for each key, whether `Transport.get` may find its message; False means that it would not.

        Args:
            since: a ticket that was read before the last look for these messages, which found none of them.
        """

    @abstractmethod
    def wait(self, ticket: Hashable, seconds: float) -> None:
        """Sleep until a message of the edge is shown, at most ``seconds``, or not at all if ``ticket`` is outdated.

        It may return sooner, and in rare cases a message does not end the sleep.
        """

    @abstractmethod
    def wake(self) -> None:
        """End the sleep of all who wait for messages of the edge."""
