"""Storage of an outbox's messages: small ones in a ring beside its index, others in growing pools by modality."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from pathlib import Path
from typing import Any

from vllm_omni_sched.connectors.arena import index as at
from vllm_omni_sched.connectors.arena import meeting, tuning
from vllm_omni_sched.connectors.arena.extents import Extents
from vllm_omni_sched.connectors.arena.index import RING, Layout
from vllm_omni_sched.connectors.arena.memory import Memory
from vllm_omni_sched.connectors.arena.options import MIB, ArenaOptions, Modality, PoolOptions
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


PIECE = 32 * MIB  # allocated at a time, unless a message needs more
WARMING_REST = 0.05  # seconds between two pieces, because zeroing memory competes with messages


def _most_bytes(options: PoolOptions) -> int:
    """Return the largest size of a pool, in whole blocks."""
    return options.max_bytes // options.block_bytes * options.block_bytes


class Pool:
    """Pool of memory for the messages of one modality.

    The first message allocates ``initial_bytes``, and a full pool grows by ``growth_factor``, up to ``max_bytes``. Of
    more than `PIECE`, a message waits for that or what it needs; a thread continues, because gigabytes take seconds to
    be zeroed.

    Attributes:
        refused: the file system's error when the pool last failed to grow, "" if it succeeded.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, options: PoolOptions, growth_factor: float) -> None:
        self._options, self._factor = options, growth_factor
        self.limit = _most_bytes(options)
        with contextlib.ExitStack() as undo:
            fd = meeting.create(path, 0)
            undo.callback(os.close, fd)
            undo.callback(path.unlink)
            os.ftruncate(fd, self.limit)  # reserves addresses; `commit` allocates memory
            self.memory = Memory(fd, self.limit, 0)
            undo.pop_all()
        self.extents = Extents(options.block_bytes)
        self.refused = ""
        self._goal = options.initial_bytes  # size up to which memory is being allocated
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
                if offset is None and self._grow(self.extents.rounded(nbytes) - self.extents.free_at_end):
                    offset = self._allocate(nbytes)
                if self._warming is None and self.extents.capacity < self._goal:
                    self._warming = threading.Thread(target=self._warm, name="arena-pool", daemon=True)
                    self._warming.start()
        return None if offset is None else (offset, self.extents.rounded(nbytes))

    def free(self, offset: int) -> int:
        """Free room; return the number of freed bytes."""
        with self._lock:
            return self.extents.free(offset)

    def close(self) -> None:
        """Unmap the pool, once its thread has ended; the file stays."""
        self._closed.set()
        if (warming := self._warming) is not None:
            warming.join()
        self.memory.close()

    def _allocate(self, nbytes: int) -> int | None:
        with self._lock:
            return self.extents.allocate(nbytes)

    def _grow(self, needed: int) -> bool:
        """Allocate ``needed`` bytes or more, with `_growing` held; return False, with nothing changed, if it cannot."""
        capacity = self.extents.capacity
        if capacity + needed > self.limit:
            return False
        if capacity >= self._goal:
            self._goal = min(max(int(capacity * self._factor), capacity + needed), self.limit)
        step = max(needed, self.extents.rounded(min(self._goal - capacity, PIECE)))
        # a nearly full file system may have room for this message
        for more in dict.fromkeys((step, needed)):
            upto = min(capacity + more, self.limit)
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
        """Allocate up to the goal in pieces. After a refusal, only messages allocate, what they need."""
        while not self._closed.wait(WARMING_REST):
            with self._growing:
                missing = self._goal - self.extents.capacity
                if missing <= 0:
                    self._warming = None
                    return
                if not self._grow(self.extents.rounded(min(missing, PIECE))):
                    if self.refused:
                        logger.warning(
                            "an arena pool cannot grow beyond %d bytes: %s", self.extents.capacity, self.refused
                        )
                    return


POOLS = {Modality.TEXT: 1, Modality.IMAGE: 2, Modality.AUDIO: 3}


class Storage:
    """The files of one outbox: one with its index and ring, which receivers find, and one for each pool in use.

    Attributes:
        memory: memory of the file with the index and the ring, laid out by `layout`.
        smallest_pool_bytes: size up to which a message fits into any pool.

    Raises:
        OSError: no memory for the index and the ring.
    """

    def __init__(self, directory: Path, options: ArenaOptions) -> None:
        self._directory, self._options = directory, options
        self.layout = Layout.of(options.max_messages, options.ring_bytes)
        self._token = secrets.token_hex(8)
        self._path = directory / f"{self._token}{meeting.OUTBOX}"
        unfinished = directory / f"{self._token}{meeting.UNFINISHED}"
        with contextlib.ExitStack() as undo:
            fd = meeting.create(unfinished, self.layout.nbytes)
            undo.callback(os.close, fd)
            undo.callback(unfinished.unlink, missing_ok=True)
            self._life = meeting.live(unfinished)
            undo.callback(meeting.let_go, self._life)
            self.memory = Memory(fd, self.layout.nbytes, self.layout.nbytes)
            head = (at.MAGIC, at.VERSION, self.layout.slots, self.layout.ring, self.layout.ring_bytes, os.getpid())
            at.HEAD.pack_into(self.memory.map, 0, *head)
            unfinished.rename(self._path)  # receivers see only complete files
            undo.pop_all()
        self._ring = Extents(64, self.layout.ring_bytes)
        self._pools: dict[int, Pool] = {}
        self._pool_options = {modality: options.pool(modality) for modality in Modality}
        self._inline: dict[Modality, int] = {}  # modality -> bytes up to which messages go through the ring
        self.smallest_pool_bytes = min(_most_bytes(pool) for pool in self._pool_options.values())
        self.tune()

    def tune(self) -> None:
        """Adapt the limit for the ring to the measurements of receivers."""
        limits = tuning.told(self._directory) if self._options.tune_inline else []
        for modality, options in self._pool_options.items():
            limit = tuning.limit_of(options.inline_bytes, limits)
            self._inline[modality] = limit + limit // 16  # includes the data in front of the payload

    def can_hold(self, nbytes: int, modality: Modality, may_be_inline: bool) -> bool:
        """Return whether empty storage would have room for a message."""
        inline = may_be_inline and nbytes <= min(self._inline[modality], self._ring.capacity)
        return inline or nbytes <= _most_bytes(self._pool_options[modality])

    def allocate(self, nbytes: int, modality: Modality, may_be_inline: bool) -> tuple[int, int, int] | None:
        """Allocate room; return the number of a pool, the offset in it and the bytes held, None if there is none now.

        Raises:
            OSError: no memory for a pool.
        """
        inline = may_be_inline and nbytes <= self._inline[modality]
        if inline and (offset := self._ring.allocate(nbytes)) is not None:
            return RING, offset, self._ring.rounded(nbytes)
        number = POOLS[modality]
        pool = self._pools.get(number)
        if pool is None:
            path = self._directory / f"{self._token}.{number}{meeting.POOL}"
            pool = self._pools[number] = Pool(path, self._pool_options[modality], self._options.growth_factor)
        place = pool.allocate(nbytes)
        return None if place is None else (number, *place)

    def free(self, pool: int, offset: int) -> None:
        """Free room."""
        (self._ring if pool == RING else self._pools[pool]).free(offset)

    def at(self, pool: int, offset: int, nbytes: int) -> tuple[memoryview, int]:
        """Return the memory at a place, and its address."""
        if pool == RING:
            memory, start = self.memory, offset + self.layout.ring
        else:
            memory, start = self._pools[pool].memory, offset
        return memory.view[start : start + nbytes], memory.address + start

    def pool(self, modality: Modality) -> Pool | None:
        """Return the pool of a modality; None if it has not been used."""
        return self._pools.get(POOLS[modality])

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        pools = {
            modality.value: {
                "capacity_bytes": pool.extents.capacity,
                "used_bytes": pool.extents.used_bytes,
                "fragmentation": round(pool.extents.fragmentation, 3),
                "refused": pool.refused,
            }
            for modality in POOLS
            if (pool := self.pool(modality)) is not None
        }
        ring = {"capacity_bytes": self._ring.capacity, "used_bytes": self._ring.used_bytes}
        inline = {modality.value: limit for modality, limit in self._inline.items()}
        return {"ring": ring, "pools": pools, "inline_up_to": inline}

    def close(self, remove: bool) -> None:
        """Unmap the files; ``remove`` them if no message in them is needed any more."""
        if remove:
            meeting.remove_member(self._path)
        for pool in self._pools.values():
            pool.close()
        self.memory.close()
        meeting.let_go(self._life)

    def abandon(self) -> None:
        """Release the resources that a forked child has inherited."""
        for memory in (self.memory, *(pool.memory for pool in self._pools.values())):
            memory.close()
