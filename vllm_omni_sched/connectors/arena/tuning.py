"""Tuning of the size limit of messages in the ring: the size up to which a copy is cheaper than a view."""

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
"""Sizes in bytes: below the first, the fixed cost dominates; above the second, the cost per byte is measured."""
MEASURED = 16
"""Number of messages of each kind before a limit is computed."""
RANGE = 4
"""Factor by which a limit may differ from the option, in either direction."""
LOW, HIGH = 32 << 10, 1 << 20
"""Limits in bytes that tuning may always reach: those of the design article for text and for images."""
_LIMIT = struct.Struct("<d")


class ReceivingCost:
    """Costs of one receiver, in seconds: of copies by their bytes, and of views, which do not depend on the size.

    Medians of the last ones are used, because a process that waits for its processor distorts single values.
    """

    def __init__(self) -> None:
        self._few, self._many, self._views, self._ends = (deque[Any](maxlen=MEASURED) for _ in range(4))

    def copied(self, nbytes: int, seconds: float) -> None:
        """Record a message that was copied out of the ring."""
        if nbytes <= FEW:
            self._few.append(seconds)
        elif nbytes >= MANY:
            self._many.append((nbytes, seconds))

    def viewed(self, seconds: float) -> None:
        """Record a message that was received as a view."""
        self._views.append(seconds)

    def ended(self, seconds: float) -> None:
        """Record the end of a lease, after the last view of a message was dropped; in any thread."""
        self._ends.append(seconds)

    @property
    def limit_bytes(self) -> float | None:
        """Return the size at which a copy and a view cost the same; None until enough was measured."""
        if min(map(len, (self._few, self._many, self._views, self._ends))) < MEASURED:
            return None
        few = statistics.median(self._few)
        per_byte = statistics.median((seconds - few) / nbytes for nbytes, seconds in self._many)
        view = statistics.median(self._views) + statistics.median(self._ends)
        return max(0.0, view - few) / per_byte if per_byte > 0 else None


def tell(inbox: Path, limit_bytes: float) -> None:
    """Write a receiver's limit into its file."""
    fd = os.open(inbox, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(fd, _LIMIT.pack(limit_bytes), 0)
    finally:
        os.close(fd)


def told(directory: Path) -> list[float]:
    """Return the limits of all receivers of an arena that have published one."""
    found = []
    with contextlib.suppress(OSError):  # no descriptors: the limits read so far suffice
        for inbox in directory.glob(f"*{meeting.INBOX}"):
            with contextlib.suppress(FileNotFoundError), inbox.open("rb") as file:
                said = file.read(_LIMIT.size)
                if len(said) == _LIMIT.size:
                    found.append(_LIMIT.unpack(said)[0])
    return found


def bounds_of(inline_bytes: int) -> tuple[int, int]:
    """Return the least and the largest limit that tuning may choose, from the option; 0 stays 0."""
    if not inline_bytes:
        return 0, 0
    return min(inline_bytes // RANGE, LOW), max(inline_bytes * RANGE, HIGH)


def limit_of(inline_bytes: int, receivers: Iterable[float]) -> int:
    """Return the payload size up to which messages go through the ring, from the option and receivers' limits."""
    sound = [limit for limit in receivers if 0 <= limit < float("inf")]
    if not sound:
        return inline_bytes
    least, most = bounds_of(inline_bytes)
    return int(min(max(statistics.median(sound), least), most))
