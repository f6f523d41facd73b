"""A pool of an outbox: one file that grows up to its bound."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.extents import Extents
from vllm_omni_sched.connectors.arena.memory import Memory
from vllm_omni_sched.connectors.arena.options import MIB, PoolOptions
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

PIECE = 32 * MIB  # allocated at a time
WARMING_REST = 0.05  # seconds between two pieces, because zeroing memory competes with messages


class Pool:
    """Room for the messages of one modality.

    The first message allocates what it needs; a thread continues up to ``initial_bytes``, so that no message waits for
    gigabytes to be zeroed. After that, a full pool grows by ``growth_factor``, up to ``max_bytes``.

    Attributes:
        refused: the file system's error when the pool last failed to grow, "" if it succeeded.

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
            os.ftruncate(fd, self.limit)  # reserves addresses; `commit` allocates memory
            self.memory = Memory(fd, self.limit, 0)
            undo.pop_all()
        self.extents = Extents(options.block_bytes)
        self.refused = ""
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._closed = threading.Event()
        self._warming: threading.Thread | None = None

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """Return the offset of ``nbytes`` and the size held for them; None if the pool cannot grow further."""
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
        """Free room; return how many bytes."""
        with self._lock:
            return self.extents.free(offset)

    def close(self) -> None:
        """Unmap the pool, once its thread has ended; the file stays."""
        self._closed.set()
        if self._warming is not None:
            self._warming.join()
        self.memory.close()

    def _allocate(self, nbytes: int) -> int | None:
        with self._lock:
            return self.extents.allocate(nbytes)

    def _grow(self, nbytes: int) -> bool:
        """Allocate more memory, with `_growing` held; return False if there is none."""
        capacity, needed = self.extents.capacity, self.extents.rounded(nbytes)
        if capacity + needed - self.extents.free_at_end > self.limit:
            return False  # not even the maximum would suffice, because used extents are in between
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
            with self._lock:
                self.extents.extend(upto)
            self.refused = ""
            return True
        return False

    def _warm(self) -> None:
        while not self._closed.wait(WARMING_REST) and self.extents.capacity < self._options.initial_bytes:
            with self._growing:
                if not self._grow(min(PIECE, self._options.initial_bytes - self.extents.capacity)):
                    if self.refused:
                        logger.warning(
                            "an arena pool cannot grow beyond %d bytes: %s", self.extents.capacity, self.refused
                        )
                    return
