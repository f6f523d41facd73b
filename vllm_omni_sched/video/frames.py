"""Memory for decoded frames: one memory file that decoders write to, and arrays look into.

Addresses are set aside for more than may be used, so that room need not be moved together; memory comes with the first
write, on the processor of the decoder that writes, and goes back to the system when arrays go.
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
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.connectors.arena.memory import Memory
from vllm_omni_sched.connectors.arena.room import Extents
from vllm_omni_sched.errors import DecoderError, VideoDeadlineError
from vllm_omni_sched.video.input import punch

if TYPE_CHECKING:
    import numpy.typing as npt

_BLOCK = 2 << 20  # a huge page
_SLACK = 2  # addresses for each byte that may be used
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Room:
    """Room for the frames of one video; it is given back when this object has gone, and all arrays of it.

    Attributes:
        start: where it begins, in the memory of all frames.
        nbytes: of it.
    """

    def __init__(self, memory: Memory, start: int, nbytes: int) -> None:
        self.start, self.nbytes = start, nbytes
        self._view = memory.view[start : start + nbytes]  # keeps it mapped, whoever closes it
        self._address = memory.address + start

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"data": (self._address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def array(self) -> npt.NDArray[np.uint8]:
        """All of it, as bytes; whoever has the array, or a part of it, has the room."""
        return np.asarray(self)


class FrameMemory:
    """Gives out room for frames.

    Room comes back without a lock (an array may go at any moment, in the middle of anything), and is taken up by
    `reclaim`, or by whoever needs room next. Those who wait for room have it in their order; nobody passes the first,
    or a large video would wait for ever.

    Fresh memory is dear (page faults may take longer than decoding), so what was in use at once within the last seconds
    stays: under load it is used again, and afterwards it goes.

    Args:
        max_bytes: given out at once.
        keep_bytes: of what is free, how much keeps its memory for good.
        returned: called when room has come back; must not block.
        keep_seconds: how long memory that was in use stays beyond that; up to twice as long.
        clock: in seconds.

    Raises:
        OSError: there is no memory file.
    """

    def __init__(
        self,
        max_bytes: int,
        keep_bytes: int,
        returned: Callable[[], None],
        keep_seconds: float = 0.0,
        clock: Clock = monotonic_seconds,
    ) -> None:
        self.max_bytes, self._keep, self._wake = max_bytes, keep_bytes, returned
        self._clock = clock
        self._use = _RecentUse(keep_seconds)
        nbytes = -(-max_bytes // _BLOCK) * _BLOCK * _SLACK
        fd = os.memfd_create("omni-sched-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)  # only addresses
            # a decoder that was taken over must not cut off what its owner looks at
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = Memory(fd, nbytes, 0)
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(OSError, AttributeError):
            self._memory.map.madvise(mmap.MADV_HUGEPAGE)
        self._extents = Extents(_BLOCK, nbytes)
        self._back: deque[int] = deque()
        self._changed = threading.Condition()
        self._waiting: list[tuple[tuple[float, ...], int]] = []  # a heap: order, number
        self._numbers = itertools.count()
        self._kept: dict[int, int] = {}  # free extents that have memory: start -> bytes
        self._closed = False

    @property
    def fd(self) -> int:
        """Of the memory file, for decoders."""
        return self._memory.fd

    @property
    def used_bytes(self) -> int:
        """Given out."""
        return self._extents.used_bytes

    def allocate(self, nbytes: int, wait: Callable[[], float], order: tuple[float, ...] = ()) -> Room:
        """Room for ``nbytes``, as soon as there is.

        Args:
            wait: seconds that are left to wait.
            order: of those who wait; the least has room first, equals as they came.

        Raises:
            VideoDeadlineError: other videos need it all the time.
            DecoderError: closed.
        """
        with self._changed:
            turn = (order, next(self._numbers))
            heapq.heappush(self._waiting, turn)
            try:
                start = self._wait_for(nbytes, turn, wait)
            finally:
                self._waiting.remove(turn)
                heapq.heapify(self._waiting)
                self._changed.notify_all()  # somebody else is the first now
            self._kept_goes(start, self._extents.rounded(nbytes))
            self._use.note(self._extents.used_bytes, self._clock())
            room = Room(self._memory, start, nbytes)
            weakref.finalize(room, _give_back, self._back, start, self._wake).atexit = False
            return room

    def _wait_for(self, nbytes: int, turn: tuple[tuple[float, ...], int], wait: Callable[[], float]) -> int:
        while True:
            if self._closed:
                raise DecoderError("video decoding was closed")
            self._take_back()
            start = self._fits(nbytes) if self._waiting[0] == turn else None
            if start is not None:
                return start
            left = wait()
            if left <= 0:
                raise VideoDeadlineError(
                    f"no room for {nbytes} bytes of frames: {self._extents.used_bytes} of {self.max_bytes} are "
                    "held by other videos; raise option 'max_output_bytes', or let go of their frames"
                )
            self._changed.wait(left)

    def reclaim(self) -> bool:
        """Take up room that has come back, and tell those who wait for it; whether memory stays that is to go later."""
        if self._back or self._warm:
            with self._changed:
                self._take_back()
                self._changed.notify_all()
        return self._warm

    @property
    def _warm(self) -> bool:
        return sum(self._kept.values()) > self._keep

    def close(self) -> None:
        """Nobody gets room any more; arrays that are there stay. May be called twice."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._memory.close()
                self._changed.notify_all()

    def abandon(self) -> None:
        """Close the file in a forked child, where locks may be held by threads that are not there."""
        if not self._closed:
            self._closed = True
            self._changed = threading.Condition()
            os.close(self._memory.fd)

    def _fits(self, nbytes: int) -> int | None:
        used = self._extents.used_bytes
        over = used + self._extents.rounded(nbytes) > self.max_bytes
        if over and (used or nbytes > self.max_bytes):  # one that fits exactly may be rounded up beyond the bound
            return None
        return self._extents.allocate(nbytes)

    def _take_back(self) -> None:
        while self._back:
            start = self._back.popleft()
            nbytes = self._extents.free(start)
            self._kept[start] = nbytes
        used = self._extents.used_bytes
        over = sum(self._kept.values()) - max(self._keep, self._use.peak(used, self._clock()) - used)
        while over > 0 and not self._closed:  # the highest first: room is given out from below
            start = max(self._kept)
            nbytes = self._kept.pop(start)
            keeps = max(0, nbytes - over) // _BLOCK * _BLOCK
            punch(self.fd, start + keeps, nbytes - keeps)
            if keeps:
                self._kept[start] = keeps
            over -= nbytes - keeps

    def _kept_goes(self, start: int, nbytes: int) -> None:
        """What is given out is not kept; parts of free extents may be."""
        for other, length in list(self._kept.items()):
            if other < start + nbytes and start < other + length:
                del self._kept[other]
                if other < start:
                    self._kept[other] = start - other
                if other + length > start + nbytes:
                    self._kept[start + nbytes] = other + length - start - nbytes


class _RecentUse:
    """The most bytes in use at once, of the last one to two periods."""

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


def _give_back(back: deque[int], start: int, wake: Callable[[], None]) -> None:
    back.append(start)
    wake()
