"""Memory for decoded frames: one memory file, to which decoders write and into which arrays look.

More addresses are reserved than bytes may be used, so that buffers never have to be moved together. Memory is allocated
on the first write, by the decoder that writes, and goes back to the system when the arrays are dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import DecoderError, VideoDeadlineError
from vllm_omni_sched.connectors.arena.extents import Extents
from vllm_omni_sched.connectors.arena.memory import Memory
from vllm_omni_sched.video.packet_memory import free_memory

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK = 2 << 20  # a huge page
_SLACK = 2  # addresses for each byte that may be used
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FrameBuffer:
    """Memory for the frames of one video; it is freed when this object and all arrays of it are dropped.

    Attributes:
        start: offset in the memory of all frames.
        nbytes: size in bytes.
    """

    def __init__(self, memory: Memory, start: int, nbytes: int) -> None:
        self.start, self.nbytes = start, nbytes
        self._view = memory.view[start : start + nbytes]  # keeps the memory mapped after it is closed
        self._address = memory.address + start

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"data": (self._address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def array(self) -> npt.NDArray[np.uint8]:
        """Return all of it, as bytes; the array, and any view of it, keeps the buffer."""
        return np.asarray(self)


class FrameRooms(ABC):
    """Allocates rooms for the frames of videos, in a memory of which the subclass knows the kind.

    A room is returned without a lock, because an array may be dropped at any moment. `reclaim`, or the next allocation,
    frees it. Waiting callers get room in their order; none overtakes the first, or a large video would wait forever.

    Args:
        max_bytes: most bytes allocated at once.
        addresses: bytes that rooms are cut from.
        option: name of the option that bounds them.
        clock: in seconds.
    """

    def __init__(self, max_bytes: int, addresses: int, option: str, clock: Clock) -> None:
        self.max_bytes, self._option, self._clock = max_bytes, option, clock
        self._extents = Extents(BLOCK, addresses)
        self._returned: deque[int] = deque()
        self._changed = threading.Condition()
        self._waiting: list[tuple[tuple[float, ...], int]] = []  # a heap: order, number
        self._numbers = itertools.count()
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Return the number of allocated bytes."""
        return self._extents.used_bytes

    def _allocate(self, nbytes: int, wait: Callable[[], float], order: tuple[float, ...]) -> int:
        """Return the start of a room of ``nbytes``, as soon as there is one; the condition is locked by the caller."""
        turn = (order, next(self._numbers))
        heapq.heappush(self._waiting, turn)
        try:
            return self._wait_for(nbytes, turn, wait)
        finally:
            self._waiting.remove(turn)
            heapq.heapify(self._waiting)
            self._changed.notify_all()  # another caller is the first now

    def _wait_for(self, nbytes: int, turn: tuple[tuple[float, ...], int], wait: Callable[[], float]) -> int:
        while True:
            if self._closed:
                raise DecoderError("video decoding was closed, because its server or process is shutting down")
            self._free_returned()
            start = self._try_allocate(nbytes) if self._waiting[0] == turn else None
            if start is not None:
                return start
            left = wait()
            if left <= 0:
                raise VideoDeadlineError(
                    f"no room for {nbytes} bytes of frames: {self._extents.used_bytes} of {self.max_bytes} bytes are "
                    f"held by other videos; raise option {self._option!r}, or drop their frames"
                )
            self._changed.wait(left)

    def reclaim(self) -> bool:
        """Free returned rooms and wake waiting callers; return whether memory is left to free later."""
        if self._returned or self._keeps_too_much:
            with self._changed:
                self._free_returned()
                self._changed.notify_all()
        return self._keeps_too_much

    @property
    def _keeps_too_much(self) -> bool:
        """Return whether free rooms hold memory that is to be freed later."""
        return False

    @abstractmethod
    def _free_returned(self) -> None:
        """Free the rooms in ``self._returned``; the condition is locked."""

    def close(self) -> None:
        """Refuse further allocations; existing arrays stay valid. Idempotent."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._release()
                self._changed.notify_all()

    @abstractmethod
    def _release(self) -> None:
        """Let the memory go when its last array is dropped; the condition is locked."""

    def _try_allocate(self, nbytes: int) -> int | None:
        used = self._extents.used_bytes
        over = used + self._extents.rounded(nbytes) > self.max_bytes
        if over and (used or nbytes > self.max_bytes):  # a video that fits exactly may be rounded up beyond the bound
            return None
        return self._extents.allocate(nbytes)


class FrameMemory(FrameRooms):
    """Allocates buffers for frames in memory of the host.

    Fresh memory is expensive (page faults may take longer than decoding). Therefore as much memory as was in use at
    once within the last seconds is kept: it is reused under load, and freed afterwards.

    Args:
        max_bytes: most bytes allocated at once.
        keep_bytes: free bytes that keep their memory permanently.
        on_return: called when a buffer was dropped; must not block.
        keep_seconds: how long memory beyond ``keep_bytes`` is kept after its use; up to twice as long.
        clock: in seconds.

    Raises:
        OSError: the memory file cannot be made.
    """

    def __init__(
        self,
        max_bytes: int,
        keep_bytes: int,
        on_return: Callable[[], None],
        keep_seconds: float = 0.0,
        clock: Clock = monotonic_seconds,
    ) -> None:
        nbytes = -(-max_bytes // BLOCK) * BLOCK * _SLACK
        super().__init__(max_bytes, nbytes, "max_output_bytes", clock)
        self._keep, self._wake = keep_bytes, on_return
        self._use = _RecentUse(keep_seconds)
        fd = os.memfd_create("omni-sched-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)  # only addresses
            # a compromised decoder must not truncate memory that its owner reads
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = Memory(fd, nbytes, 0)
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(OSError, AttributeError):
            self._memory.map.madvise(mmap.MADV_HUGEPAGE)
        self._kept: dict[int, int] = {}  # free extents that have memory: start -> bytes

    @property
    def fd(self) -> int:
        """Return the descriptor of the memory file, for decoders."""
        return self._memory.fd

    def allocate(self, nbytes: int, wait: Callable[[], float], order: tuple[float, ...] = ()) -> FrameBuffer:
        """Return a buffer of ``nbytes``, as soon as there is room.

        Args:
            wait: returns the seconds that are left to wait.
            order: order among waiting callers; the least gets room first, equal ones as they came.

        Raises:
            VideoDeadlineError: other videos held the room until the deadline.
            DecoderError: the memory is closed.
        """
        with self._changed:
            start = self._allocate(nbytes, wait, order)
            self._remove_from_kept(start, self._extents.rounded(nbytes))
            self._use.note(self._extents.used_bytes, self._clock())
            buffer = FrameBuffer(self._memory, start, nbytes)
            weakref.finalize(buffer, return_room, self._returned, start, self._wake).atexit = False
            return buffer

    @property
    def _keeps_too_much(self) -> bool:
        return sum(self._kept.values()) > self._keep

    def _release(self) -> None:
        self._memory.close()

    def abandon(self) -> None:
        """Close the file in a forked child, where locks may be held by threads that do not exist there."""
        if not self._closed:
            self._closed = True
            self._changed = threading.Condition()
            os.close(self._memory.fd)

    def _free_returned(self) -> None:
        while self._returned:
            start = self._returned.popleft()
            nbytes = self._extents.free(start)
            self._kept[start] = nbytes
        used = self._extents.used_bytes
        over = sum(self._kept.values()) - max(self._keep, self._use.peak(used, self._clock()) - used)
        while over > 0 and not self._closed:  # the highest first, because room is allocated from below
            start = max(self._kept)
            nbytes = self._kept.pop(start)
            keeps = max(0, nbytes - over) // BLOCK * BLOCK
            free_memory(self.fd, start + keeps, nbytes - keeps)
            if keeps:
                self._kept[start] = keeps
            over -= nbytes - keeps

    def _remove_from_kept(self, start: int, nbytes: int) -> None:
        """Remove an allocated extent from the kept ones; the remaining parts of free extents stay kept."""
        for other, length in list(self._kept.items()):
            if other < start + nbytes and start < other + length:
                del self._kept[other]
                if other < start:
                    self._kept[other] = start - other
                if other + length > start + nbytes:
                    self._kept[start + nbytes] = other + length - start - nbytes


class _RecentUse:
    """Tracks the most bytes in use at once during the last one to two periods."""

    def __init__(self, period_seconds: float) -> None:
        self._period = period_seconds
        self._began = float("-inf")
        self._now = self._before = 0

    def note(self, used: int, now: float) -> None:
        if now - self._began >= self._period:
            self._before = self._now if now - self._began < 2 * self._period else 0
            self._now, self._began = 0, now
        self._now = max(self._now, used)

    def peak(self, used: int, now: float) -> int:
        self.note(used, now)
        return max(self._now, self._before)


def return_room(back: deque[int], start: int, wake: Callable[[], None]) -> None:
    back.append(start)
    wake()
