"""Slots of frames in shared memory, filled by one process and emptied by another.

A byte for each slot says whether it is in use. The process sets it before it announces the frame, the owner clears it
when the frame is gone, which may be in a garbage collection: so that is one store and an event, and waits for nothing.
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
    """Memory of a ring."""
    return _HEAD + slots * height * width * 3


def ring_memory(nbytes: int) -> int:
    """Memory for a ring: a descriptor, for the caller to close. Whoever gets it cannot take the memory away again."""
    memory = os.memfd_create("omni-sched-live", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, nbytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(memory)
        raise
    return memory


class Ring:
    """One side's look at it.

    Args:
        memory: descriptor of `ring_bytes`; closed by the caller.
        free: descriptor of the event; it is the ring's from here on.
    """

    def __init__(self, memory: int, free: int, slots: int, height: int, width: int) -> None:
        self._map = mmap.mmap(memory, ring_bytes(slots, height, width))
        self._used = np.frombuffer(self._map, np.uint8, slots)
        self._free, self._slots = free, slots
        self._shape = (height, width, 3)
        self.returned = 0
        """How often the owner's side has given a slot back."""
        self._close = weakref.finalize(self, os.close, free)

    def fileno(self) -> int:
        """Readable when a slot may be free again."""
        return self._free

    # the process's side

    def take(self) -> int | None:
        """A slot that is free; None where all are in use."""
        free = np.flatnonzero(self._used == 0)
        return int(free[0]) if len(free) else None

    def picture(self, slot: int) -> npt.NDArray[np.uint8]:
        """Its memory, shape (height, width, 3), to be written."""
        return self._at(slot).reshape(self._shape)

    def mark(self, slot: int) -> None:
        """It is in use until the other side gives it back."""
        self._used[slot] = 1

    def heard(self) -> None:
        """What the event said is known now."""
        os.eventfd_read(self._free)

    # the owner's side

    def frame(self, slot: int) -> npt.NDArray[np.uint8]:
        """Its picture; the slot is free again when nobody looks at that, or a part of it, any more."""
        flat = self._at(slot)
        flat.flags.writeable = False
        weakref.finalize(flat, self._give_back, slot).atexit = False
        return flat.reshape(self._shape)

    def _give_back(self, slot: int) -> None:
        self._used[slot] = 0
        self.returned += 1
        os.eventfd_write(self._free, 1)

    def _at(self, slot: int) -> npt.NDArray[np.uint8]:
        nbytes = self._shape[0] * self._shape[1] * 3
        return np.frombuffer(self._map, np.uint8, nbytes, _HEAD + slot * nbytes)
