"""Delivery of each message once: tickets of moved messages, by which second copies are dropped."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connectors.disk.files import TAKEN_TICKET, TICKET, UNFINISHED
from vllm_omni_sched.connectors.disk.members import Members
from vllm_omni_sched.connectors.framing import Arrival
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


class Tickets:
    """Tickets of moved messages: files that exist while there may be two copies of a message, in its old and new tier.

    1. The first receiver of a copy takes the ticket. The second one finds it taken, and drops its copy.
    2. A ticket that was taken by a dead process can be taken again: the process may have given its copy back.
    3. The mover removes its ticket. If the mover has died, the second receiver removes it, or finally a sweep.

    Args:
        members: members of a directory that all sending and receiving processes share.
    """

    def __init__(self, members: Members, clock: Clock) -> None:
        self._members, self._clock = members, clock

    def write(self, number: int) -> None:
        """Write a ticket for the message of that id, which is about to have two copies.

        Raises:
            OSError: the ticket cannot be written; the message should not be moved.
        """
        path = self._ticket(number)
        with open(path, "w", opener=_private) as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask
            file.write(f"{self._members.number:08x}")
        now_ns = int(self._clock() * 1e9)
        os.utime(path, ns=(now_ns, now_ns))

    def remove(self, number: int) -> None:
        """Remove the ticket of a message that has one copy again."""
        self._ticket(number).unlink(missing_ok=True)
        self._taken(number).unlink(missing_ok=True)

    def take(self, number: int) -> bool:
        """Return whether a received copy is the first.

        A ticket is taken by a symbolic link whose target names the process: this works on a full disk, and needs no
        descriptor.

        Raises:
            OSError: the ticket cannot be read or taken now.
        """
        if not os.access(self._ticket(number), os.F_OK):
            return True
        taken, ours = self._taken(number), f"{self._members.number:08x}"
        try:
            os.symlink(ours, taken)
            return True
        except FileExistsError:
            pass
        try:
            taker = int(os.readlink(taken), 16)
        except FileNotFoundError:
            return False  # the mover has just removed it, and another receiver had taken it
        if self._members.is_alive(taker):
            self.remove(number)
            return False
        link = self._members.own_file(number.to_bytes(8, "little"), UNFINISHED)
        try:
            os.symlink(ours, link)
            os.rename(link, taken)
        except OSError:
            link.unlink(missing_ok=True)
            raise
        return True

    def _ticket(self, number: int) -> Path:
        return self._members.directory / f"{number:016x}{TICKET}"

    def _taken(self, number: int) -> Path:
        return self._members.directory / f"{number:016x}{TAKEN_TICKET}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class Found(NamedTuple):
    """Message received from a tier, and the name of the transport that carried it."""

    name: bytes
    arrival: Arrival
    carrier: str


class DuplicateFilter:
    """Filter of received messages that drops second copies, by tickets.

    A received message is not in its tier any more. If its ticket cannot be checked now, the message is kept, and
    returned by the next `get` of its name.

    Args:
        tickets: tickets of moved messages; None: there are never two copies.
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
            RendezvousError: the ticket cannot be checked now; the message is kept.
        """
        number = found.arrival.id
        try:
            return self._tickets is None or not number or self._tickets.take(number)
        except OSError as error:
            with self._lock:
                self._kept.setdefault(found.name, []).append(found)
            raise RendezvousError(f"cannot check whether a message was received before: {error.strerror}") from error

    def close(self) -> None:
        """Drop the kept messages."""
        with self._lock:
            lost = sum(map(len, self._kept.values()))
            self._kept.clear()
        if lost:
            logger.error("%d messages are lost at close: whether they had been received before is not known", lost)

    def forget_locks(self) -> None:
        """Reset the lock in a forked child, where another thread may have held it."""
        self._lock = threading.Lock()
