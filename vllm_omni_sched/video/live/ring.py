"""A ring of slots for frames in shared memory, filled by one process and emptied by another.

A byte for each slot tells whether it is in use. The process sets it before it announces the frame. The owner clears it
when the frame is dropped, possibly during garbage collection: so that is one store and an event, without any waiting.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_SLOTS = 256
_HEAD = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def ring_bytes(slots: int, height: int, width: int) -> int:
    """Return the size of a ring's memory in bytes."""
    return _HEAD + slots * height * width * 3


def ring_memory(nbytes: int) -> int:
    """Return a descriptor of memory for a ring, for the caller to close. Receivers cannot shrink the memory."""
    memory = os.memfd_create("omni-sched-live", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, nbytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(memory)
        raise
    return memory


class Ring:
    """Reads or fills a ring, on one of its sides.

    Args:
        memory: descriptor of the ring's memory; closed by the caller.
        free: descriptor of the event; owned by the ring from here on.
    """

    def __init__(self, memory: int, free: int, slots: int, height: int, width: int) -> None:
        self._map = mmap.mmap(memory, ring_bytes(slots, height, width))
        self._used = np.frombuffer(self._map, np.uint8, slots)
        self._free, self._slots = free, slots
        self._shape = (height, width, 3)
        self.freed = 0
        """Number of slots that the owner's side has freed."""
        self._close = weakref.finalize(self, os.close, free)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a slot may be free again."""
        return self._free

    # the side of the process that decodes

    def free_slot(self) -> int | None:
        """Return a free slot; None if all are in use."""
        free = np.flatnonzero(self._used == 0)
        return int(free[0]) if len(free) else None

    def pixels(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return the memory of a slot, shape (height, width, 3), for writing."""
        return self._memory_of(slot).reshape(self._shape)

    def mark(self, slot: int) -> None:
        """Mark a slot as in use until the other side frees it."""
        self._used[slot] = 1

    def reset_event(self) -> None:
        """Reset the event."""
        os.eventfd_read(self._free)

    # the side of the owner

    def frame(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return the pixels of a slot; the slot is freed when the array and all its views are dropped."""
        flat = self._memory_of(slot)
        flat.flags.writeable = False
        weakref.finalize(flat, self._mark_free, slot).atexit = False
        return flat.reshape(self._shape)

    def _mark_free(self, slot: int) -> None:
        self._used[slot] = 0
        self.freed += 1
        os.eventfd_write(self._free, 1)

    def _memory_of(self, slot: int) -> npt.NDArray[np.uint8]:
        nbytes = self._shape[0] * self._shape[1] * 3
        return np.frombuffer(self._map, np.uint8, nbytes, _HEAD + slot * nbytes)
