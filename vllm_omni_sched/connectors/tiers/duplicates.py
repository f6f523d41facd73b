"""Delivery of each message once: second copies are dropped, undecided ones are kept."""

from __future__ import annotations

import threading
from typing import NamedTuple

from vllm_omni_sched.connectors.framing import Arrival
from vllm_omni_sched.connectors.tiers.tickets import Tickets
from vllm_omni_sched.errors import RendezvousError
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


class Found(NamedTuple):
    """A message received from a tier, and the path by which it came."""

    name: bytes
    arrival: Arrival
    carrier: str


class DuplicateFilter:
    """Asks the tickets about what was got.

    Its tier has it no more: should there be no answer now, it is kept, and comes with the next `get` of its name.

    Args:
        tickets: None: there are never two copies.
    """

    def __init__(self, tickets: Tickets | None) -> None:
        self._tickets, self._lock = tickets, threading.Lock()
        self._kept: dict[bytes, list[Found]] = {}

    def kept(self, name: bytes) -> Found | None:
        """Return and remove a kept message of that name; None if there is none."""
        if not self._kept:
            return None
        with self._lock:
            there = self._kept.get(name)
            found = there.pop(0) if there else None
            if not there:
                self._kept.pop(name, None)
        return found

    def passes(self, found: Found) -> bool:
        """Return whether a message was not received before.

        Raises:
            RendezvousError: that cannot be found out now; it is kept.
        """
        number = found.arrival.id
        try:
            return self._tickets is None or not number or self._tickets.take(number)
        except OSError as error:
            with self._lock:
                self._kept.setdefault(found.name, []).append(found)
            raise RendezvousError(f"cannot see whether a message was got before: {error.strerror}") from error

    def close(self) -> None:
        """Drop the kept messages."""
        with self._lock:
            lost = sum(map(len, self._kept.values()))
            self._kept.clear()
        if lost:
            logger.error("%d messages are lost at close: it could not be told whether they were got before", lost)

    def forget_locks(self) -> None:
        """Reset the lock in a forked child, where another thread may have held it."""
        self._lock = threading.Lock()
