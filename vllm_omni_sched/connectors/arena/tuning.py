"""How long a message may be that goes through the ring: as long as copying it out takes less than a view does."""

from __future__ import annotations

import contextlib
import os
import statistics
import struct
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_omni_sched.connectors.arena import meeting

FEW, MANY = 4 << 10, 16 << 10
"""Bytes: below, what a message takes is its own; above, also what its bytes take."""
MEASURED = 16
"""Messages of each kind before anything is said."""
RANGE = 4
"""A limit is at most so many times what the option says, and at least that part of it."""
_LIMIT = struct.Struct("<d")


class ReceivingCost:
    """Of one receiver: seconds of copies by their bytes, and of views, which have no bytes to wait for.

    Medians of the last ones: a process that has to wait for its processor says nothing about either.
    """

    def __init__(self) -> None:
        self._few, self._many, self._views, self._ends = (deque[Any](maxlen=MEASURED) for _ in range(4))

    def copied(self, nbytes: int, seconds: float) -> None:
        """A message was copied out of the ring."""
        if nbytes <= FEW:
            self._few.append(seconds)
        elif nbytes >= MANY:
            self._many.append((nbytes, seconds))

    def viewed(self, seconds: float) -> None:
        """A message was got as a view."""
        self._views.append(seconds)

    def ended(self, seconds: float) -> None:
        """The last view of a message went, and its lease was ended; by any thread."""
        self._ends.append(seconds)

    @property
    def limit_bytes(self) -> float | None:
        """Where both take the same; None until enough was measured."""
        if min(map(len, (self._few, self._many, self._views, self._ends))) < MEASURED:
            return None
        few = statistics.median(self._few)
        per_byte = statistics.median((seconds - few) / nbytes for nbytes, seconds in self._many)
        view = statistics.median(self._views) + statistics.median(self._ends)
        return max(0.0, view - few) / per_byte if per_byte > 0 else None


def tell(inbox: Path, limit_bytes: float) -> None:
    """Leave a receiver's limit in its file."""
    fd = os.open(inbox, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(fd, _LIMIT.pack(limit_bytes), 0)
    finally:
        os.close(fd)


def told(directory: Path) -> list[float]:
    """The limits of all receivers of an arena that have told one."""
    found = []
    with contextlib.suppress(OSError):  # no descriptors: what is known will do
        for inbox in directory.glob(f"*{meeting.INBOX}"):
            with contextlib.suppress(FileNotFoundError), inbox.open("rb") as file:
                said = file.read(_LIMIT.size)
                if len(said) == _LIMIT.size:
                    found.append(_LIMIT.unpack(said)[0])
    return found


def limit_of(inline_bytes: int, receivers: Iterable[float]) -> int:
    """Bytes of payload up to which a message goes through the ring, from the option and what receivers have told."""
    sound = [limit for limit in receivers if 0 <= limit < float("inf")]
    if not sound:
        return inline_bytes
    return int(min(max(statistics.median(sound), inline_bytes / RANGE), inline_bytes * RANGE))
