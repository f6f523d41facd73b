"""How long a message may be that goes through the ring: as long as copying it out takes less than a view does."""

from __future__ import annotations

import os
import statistics
import struct
from collections.abc import Iterable
from pathlib import Path

from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.resource.rate import Rate

FEW, MANY = 4 << 10, 16 << 10
"""Bytes: below, what a message takes is its own; above, also what its bytes take."""
MEASURED = 16
"""Messages of each kind before anything is said."""
RANGE = 4
"""A limit is at most so many times what the option says, and at least that part of it."""
_LIMIT = struct.Struct("<d")


class ReceivingCost:
    """Of one receiver: seconds of copies by their bytes, and of views, which have no bytes to wait for."""

    def __init__(self) -> None:
        self._copy, self._per_byte, self._view = Rate(0.0), Rate(0.0), Rate(0.0)
        self._seen = [0, 0, 0]

    def copied(self, nbytes: int, seconds: float) -> None:
        """A message was copied out of the ring."""
        if nbytes <= FEW:
            self._copy.observe(1, seconds)
            self._seen[0] += 1
        elif nbytes >= MANY:
            self._per_byte.observe(nbytes, max(0.0, seconds - self._copy.per_unit))
            self._seen[1] += 1

    def viewed(self, seconds: float) -> None:
        """A message was got as a view."""
        self._view.observe(1, seconds)
        self._seen[2] += 1

    @property
    def limit_bytes(self) -> float | None:
        """Where both take the same; None until enough was measured."""
        if min(self._seen) < MEASURED or not self._per_byte.per_unit:
            return None
        return max(0.0, self._view.per_unit - self._copy.per_unit) / self._per_byte.per_unit


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
    for inbox in directory.glob(f"*{meeting.INBOX}"):
        try:
            with inbox.open("rb") as file:
                said = file.read(_LIMIT.size)
        except OSError:
            continue
        if len(said) == _LIMIT.size:
            found.append(_LIMIT.unpack(said)[0])
    return found


def limit_of(inline_bytes: int, receivers: Iterable[float]) -> int:
    """Bytes of payload up to which a message goes through the ring, from the option and what receivers have told."""
    sound = [limit for limit in receivers if 0 <= limit < float("inf")]
    if not sound:
        return inline_bytes
    return int(min(max(statistics.median(sound), inline_bytes / RANGE), inline_bytes * RANGE))
