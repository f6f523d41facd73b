"""A pool of an outbox: one file that grows up to its bound."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.memory import Memory
from vllm_omni_sched.connectors.arena.options import MIB, PoolOptions
from vllm_omni_sched.connectors.arena.room import Extents
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

PIECE = 32 * MIB  # set aside at a time
WARMING_REST = 0.05  # seconds between two pieces: zeroing memory takes what messages want, too


class Pool:
    """Room for the messages of one modality.

    The first message sets aside what it needs; a thread goes on to ``initial_bytes``, so that nobody waits for
    gigabytes to be zeroed. After that the pool grows by ``growth_factor`` when it is full, up to ``max_bytes``.

    Attributes:
        refused: what the file system said when the pool could not grow at last, "" if it could.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, options: PoolOptions, growth_factor: float) -> None:
        self._options, self._factor = options, growth_factor
        self.limit = options.max_bytes // options.block_bytes * options.block_bytes
        with contextlib.ExitStack() as undo:
            fd = meeting.create(path, 0)
            undo.callback(os.close, fd)
            undo.callback(path.unlink)
            os.ftruncate(fd, self.limit)  # only addresses; memory comes with `commit`
            self.memory = Memory(fd, self.limit, 0)
            undo.pop_all()
        self.extents = Extents(options.block_bytes)
        self.refused = ""
        self._books = threading.Lock()
        self._growing = threading.Lock()
        self._closed = threading.Event()
        self._warming: threading.Thread | None = None

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """Where ``nbytes`` lie now and how many are held for them; None when the pool can grow no further."""
        offset = self._allocate(nbytes)
        if offset is None:
            with self._growing:
                offset = self._allocate(nbytes)  # it may have grown while we waited
                while offset is None and self._grow(nbytes):
                    offset = self._allocate(nbytes)
        if offset is None:
            return None
        if self._warming is None and self.extents.capacity < self._options.initial_bytes:
            self._warming = threading.Thread(target=self._warm, name="arena-pool", daemon=True)
            self._warming.start()
        return offset, self.extents.rounded(nbytes)

    def free(self, offset: int) -> int:
        """Take room back; how many bytes."""
        with self._books:
            return self.extents.free(offset)

    def close(self) -> None:
        """Unmap, once its thread has ended; the file stays."""
        self._closed.set()
        if self._warming is not None:
            self._warming.join()
        self.memory.close()

    def _allocate(self, nbytes: int) -> int | None:
        with self._books:
            return self.extents.allocate(nbytes)

    def _grow(self, nbytes: int) -> bool:
        """Set more memory aside, `_growing` held; False when there is none."""
        capacity, needed = self.extents.capacity, self.extents.rounded(nbytes)
        if capacity + needed - self.extents.free_at_end > self.limit:
            return False  # not even all of it would do: what is in use lies in between
        step = max(needed, self.extents.rounded(PIECE))
        if capacity >= self._options.initial_bytes:
            step = max(step, self.extents.rounded(int(capacity * (self._factor - 1))))
        for more in dict.fromkeys((step, needed)):  # a file system that is nearly full may have what is needed
            upto = min(capacity + more, self.limit)
            if upto <= capacity:
                return False
            try:
                self.memory.commit(upto)
            except OSError as error:
                self.refused = os.strerror(error.errno or 0)
                continue
            with self._books:
                self.extents.extend(upto)
            self.refused = ""
            return True
        return False

    def _warm(self) -> None:
        while not self._closed.wait(WARMING_REST) and self.extents.capacity < self._options.initial_bytes:
            with self._growing:
                if not self._grow(min(PIECE, self._options.initial_bytes - self.extents.capacity)):
                    if self.refused:
                        logger.warning("an arena pool stays at %d bytes: %s", self.extents.capacity, self.refused)
                    return
