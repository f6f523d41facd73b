"""Registered memory: one region that is reused, and further memory when the region is full."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.config.errors import ConfigError, RendezvousError
from vllm_omni_sched.connectors.arena.extents import Extents
from vllm_omni_sched.connectors.mooncake.options import KIB
from vllm_omni_sched.connectors.mooncake.store import Store
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

BLOCK = 4 * KIB


class PooledBuffer:
    """Registered memory for one message.

    Attributes:
        data: its bytes, as an array; the memory is kept while a view of the array exists.
        start: offset in the region; None: memory outside the region.
    """

    __slots__ = ("address", "data", "start")

    def __init__(self, data: npt.NDArray[np.uint8], address: int, start: int | None) -> None:
        self.data, self.address, self.start = data, address, start


class BufferPool:
    """Pool of registered memory, usable from any thread, also during garbage collection.

    Raises:
        ConfigError: there is no memory for the region.
        RendezvousError: the library does not register it.
    """

    def __init__(self, store: Store, nbytes: int) -> None:
        self._store = store
        nbytes = nbytes // BLOCK * BLOCK
        try:
            self._region = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise ConfigError(f"option `localbuf` ({nbytes}): there is no such memory ({error.strerror})") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        store.register(self._address, nbytes)
        self.nbytes = nbytes
        self._extents = Extents(BLOCK, nbytes)
        self._lock = threading.Lock()
        self._back: deque[tuple[int | None, int]] = deque()  # a finalizer must not wait for a lock
        self.own = 0  # buffers outside the region

    @property
    def used_bytes(self) -> int:
        self._settle()
        return self._extents.used_bytes

    def take(self, nbytes: int) -> PooledBuffer | None:
        """Allocate room in the region; return None if it is full."""
        self._settle()
        with self._lock:
            start = self._extents.allocate(nbytes)
        if start is None:
            return None
        data = np.frombuffer(self._region, np.uint8, nbytes, start)
        return PooledBuffer(data, self._address + start, start)

    def make(self, nbytes: int) -> PooledBuffer:
        """Allocate room outside the region, for a single use.

        Raises:
            RendezvousError: the library does not register it.
            MemoryError: there is none.
        """
        self._settle()
        try:
            memory = mmap.mmap(-1, max(nbytes, 1))
        except OSError as error:
            raise MemoryError(f"no memory for a message of {nbytes} bytes") from error
        data = np.frombuffer(memory, np.uint8, nbytes)
        address = int(data.ctypes.data)
        self._store.register(address, nbytes)
        self.own += 1
        return PooledBuffer(data, address, None)

    def trim(self, room: PooledBuffer, nbytes: int) -> None:
        """Shrink a room to ``nbytes``."""
        if room.start is not None:
            with self._lock:
                self._extents.trim(room.start, nbytes)

    def give_back(self, room: PooledBuffer) -> None:
        """Free room, which is reused from the next `take` on."""
        self._back.append((room.start, room.address))

    def lend(self, room: PooledBuffer) -> None:
        """Free room when the last view of its data is dropped."""
        weakref.finalize(room.data, self._back.append, (room.start, room.address)).atexit = False

    def _settle(self) -> None:
        while self._back:
            try:
                start, address = self._back.popleft()
            except IndexError:  # another thread was quicker
                return
            if start is not None:
                with self._lock:
                    self._extents.free(start)
                continue
            self.own -= 1
            try:
                self._store.unregister(address)
            except RendezvousError:
                logger.warning("the Mooncake library keeps memory registered that is not used any more")
