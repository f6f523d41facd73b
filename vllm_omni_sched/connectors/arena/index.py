"""The index of an outbox in shared memory: location and state of each message.

The file of an outbox::

    0      head: magic, version, slots, offset and length of the ring, pid
    1024   how many messages were shown, by the last byte of their digests: 256 u32
    4096   digests: one u64 per slot, 0 where the slot is free
    …      records: one per slot (`Record`)
    …      ring
"""

from __future__ import annotations

import hashlib
import struct
import threading
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors.arena.memory import ByteLocks, Memory
from vllm_omni_sched.connectors.framing import Arrival

MAGIC, VERSION = b"vosarena", 1
PAGE = 4096
HEAD = struct.Struct("<8sIIQQI")
RECORD = struct.Struct("<IIIIQQQd")
REVOKED = struct.Struct("<I")
RECORD_BYTES = 64
BUCKET = 16
DIGEST = struct.Struct("<Q")


class State(IntEnum):
    """State of a slot: the sender changes FREE to READY and back to FREE; a receiver READY to LEASED to CONSUMED."""

    FREE = 0
    READY = 1
    LEASED = 2
    CONSUMED = 3


class Record(NamedTuple):
    """A message in an outbox.

    ``pool`` 0 is the ring; ``holder`` is the number of the receiver that has leased it; ``revoked`` is 1 if its sender
    has replaced it while another process had it locked.
    """

    state: int
    generation: int
    pool: int
    revoked: int
    offset: int
    nbytes: int
    holder: int
    put_at: float


POOL_AT, REVOKED_AT, HOLDER_AT, PUT_AT = 8, 12, 32, 40  # within a record
LONG_NAME = 512
"""Length in bytes above which names are not cached."""
RING = 0
"""Pool number of the ring, the room for small messages in the outbox itself."""
NEWS_AT, NEWS_KINDS = 1024, 256
"""Counters in the first page: for each value of a digest's last byte, the number of messages shown with it."""


class Layout(NamedTuple):
    """Offsets within the file of an outbox."""

    slots: int
    records: int
    ring: int
    ring_bytes: int

    @classmethod
    def of(cls, slots: int, ring_bytes: int) -> Layout:
        """Return the layout of a file with that many slots, rounded up to a power of two of whole buckets."""
        slots = max(2 * BUCKET, 1 << (slots - 1).bit_length())
        records = PAGE + slots * DIGEST.size
        ring = -(-(records + slots * RECORD_BYTES) // PAGE) * PAGE
        return cls(slots, records, ring, -(-ring_bytes // PAGE) * PAGE)

    @property
    def nbytes(self) -> int:
        return self.ring + self.ring_bytes

    @property
    def buckets(self) -> int:
        return self.slots // BUCKET

    def digest_at(self, slot: int) -> int:
        return PAGE + slot * DIGEST.size

    def record_at(self, slot: int) -> int:
        return self.records + slot * RECORD_BYTES


def digest_of(name: bytes) -> int:
    """Return 64 bits of a name, never 0. A receiver that finds a message by it compares the name in the message."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") or 1


def buckets_of(digest: int, buckets: int) -> tuple[int, int]:
    """Return the two buckets in which a message may be; the sender takes the emptier one, which balances them."""
    return digest & (buckets - 1), (digest >> 32) & (buckets - 1)


FUTURE = 1e6
"""Seconds by which no clock of a host is ahead of another."""
WORDS = RECORD_BYTES // 4  # words of a record; the first is its state
NEWS_WORD = NEWS_AT // 4
DIGEST_BYTES = DIGEST.size
BUCKET_BYTES = BUCKET * DIGEST_BYTES

FREE, READY, LEASED, CONSUMED = (int(state) for state in State)  # an enumeration is slow to look up


class Columns(NamedTuple):
    """Fields of the records of all slots, as they were at one time."""

    state: npt.NDArray[Any]
    holder: npt.NDArray[Any]
    put_at: npt.NDArray[Any]


def is_late(put_at: npt.NDArray[Any], now: float, ttl_seconds: float) -> npt.NDArray[Any]:
    """Return which messages were put more than ``ttl_seconds`` ago, or at an impossible time, as in a damaged
    record.
    """
    sound = np.isfinite(put_at) & (put_at < now + FUTURE)
    late: npt.NDArray[Any] = ~sound | (now - np.where(sound, put_at, now) > ttl_seconds)
    return late


class Index:
    """The slots of an outbox, as sender and receivers see them.

    A state that several processes may change is changed under the lock of the slot's first byte. No lock is needed
    where only one process may change it: the sender fills free slots, a receiver ends its own lease.

    Attributes:
        words: the whole file in words of 32 bits. Reading or storing one is a single access.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        memory.touch(0, layout.ring)
        # stays mapped as long as a lease needs it: a mapping with views cannot be closed
        self._bytes, self._map, self.layout = memory.map, memoryview(memory.map), layout
        words = np.frombuffer(self._map, "<u8", layout.slots * RECORD_BYTES // 8, layout.records)
        rows = words.reshape(layout.slots, RECORD_BYTES // 8)
        self._columns = Columns(rows.view("<u4")[:, 0], rows[:, HOLDER_AT // 8], rows.view("<f8")[:, PUT_AT // 8])
        self._buckets, self._records = layout.buckets, layout.records
        self.words, self._first = self._map.cast("I"), layout.records // 4
        self._locks = ByteLocks(memory.fd)
        self._order = threading.Lock()

    def find(self, digest: int) -> list[int]:
        """Return the slots with this digest whose message waits; slots that are not freed yet may have it, too."""
        slots, wanted, find = [], DIGEST.pack(digest), self._bytes.find
        one, other = buckets_of(digest, self._buckets)
        for bucket in (one, other) if one != other else (one,):
            start = PAGE + bucket * BUCKET_BYTES
            end = start + BUCKET_BYTES
            at = find(wanted, start, end)
            while at >= 0:
                slot, beside = divmod(at - PAGE, DIGEST_BYTES)
                if not beside and self.words[self._first + slot * WORDS] == READY:
                    slots.append(slot)
                at = find(wanted, at + 1, end)
        return slots

    def news(self, digest: int) -> int:
        """Return a number that changes when a message is shown that may have this digest.

        The change may be late, because processors reorder writes, and may be lost, because processes that give back do
        not synchronise: search from time to time in any case.
        """
        return self.words[NEWS_WORD + digest % NEWS_KINDS]

    def all_news(self) -> bytes:
        """Return the counters of `news` of all digests."""
        return self._bytes[NEWS_AT : NEWS_AT + 4 * NEWS_KINDS]

    def record(self, slot: int) -> Record:
        """Return the current record of a slot."""
        return Record(*RECORD.unpack_from(self._map, self._records + slot * RECORD_BYTES))

    def state(self, slot: int) -> int:
        """Return the current state of a slot."""
        return self.words[self._first + slot * WORDS]

    def settled(self, slot: int) -> int | None:
        """Return the state of a slot while no process has it locked; None if one has."""
        at = self.layout.record_at(slot)
        if not self._locks.acquire(at):
            return None
        try:
            return self.state(slot)
        finally:
            self._locks.release(at)

    def columns(self) -> Columns:
        """Return a copy of the records of all slots."""
        return Columns(*(column.copy() for column in self._columns))

    # operations of the sender, or of a receiver if the sender is dead

    def publish(
        self, slot: int, digest: int, generation: int, pool: int, offset: int, nbytes: int, put_at: float
    ) -> None:
        """Show a written message, in a free slot, to receivers; see `Record`."""
        at = self._records + slot * RECORD_BYTES
        with self._order:
            RECORD.pack_into(self._map, at, FREE, generation, pool, 0, offset, nbytes, 0, put_at)
            DIGEST.pack_into(self._map, self.layout.digest_at(slot), digest)
        with self._order:  # releasing and acquiring the lock orders the writes for other processors
            self.words[self._first + slot * WORDS] = READY
        self._tell(digest)

    def withdraw(self, slot: int) -> int | None:
        """Free a slot unless it is leased, and return its former state; None if another process has it locked."""
        at = self.layout.record_at(slot)
        if not self._locks.acquire(at):
            return None
        try:
            state = self.state(slot)
            if state != LEASED:
                self.free(slot)
            return state
        finally:
            self._locks.release(at)

    def revoke(self, slot: int) -> None:
        """Mark a message as revoked: only a process that has it locked already can still take it."""
        REVOKED.pack_into(self._map, self._records + slot * RECORD_BYTES + REVOKED_AT, 1)

    def free(self, slot: int) -> None:
        """Empty a slot that no process uses any more."""
        self.words[self._first + slot * WORDS] = FREE
        DIGEST.pack_into(self._map, PAGE + slot * DIGEST_BYTES, 0)

    def give_back(self, slot: int, holder: int) -> bool:
        """Show a message again whose receiver has died or cannot take it; return whether that was done."""
        at = self.layout.record_at(slot)
        if not self._locks.acquire(at):
            return False
        try:
            record = self.record(slot)
            if record.state != LEASED or record.holder != holder:
                return False
            self._set(slot, READY)
        finally:
            self._locks.release(at)
        (digest,) = DIGEST.unpack_from(self._map, self.layout.digest_at(slot))
        self._tell(digest)
        return True

    def _set(self, slot: int, state: int) -> None:
        """Set a state by a single store: `Struct.pack_into` writes zeros first, and others read without a lock."""
        self.words[self._first + slot * WORDS] = state

    def _tell(self, digest: int) -> None:
        word = NEWS_WORD + digest % NEWS_KINDS
        with self._order:
            self.words[word] = (self.words[word] + 1) & 0xFFFFFFFF

    # operations of a receiver

    def is_inline(self, slot: int) -> bool:
        """Return whether the message of a slot is in the ring."""
        return self.words[self._first + slot * WORDS + POOL_AT // 4] == RING

    def take(self, slot: int, digest: int, name: bytes) -> Arrival | None:
        """Take a message out of the ring in one step: a process that is killed during it has not taken it.

        Returns:
            A copy of the message; None if it is not available any more, or is locked.

        Raises:
            CorruptMessageError: it is damaged or has another name, or its record points outside the file; the message
                is dropped.
        """
        at = self._records + slot * RECORD_BYTES
        if not self._locks.acquire(at):
            return None
        try:
            state, generation, pool, revoked, offset, nbytes, _, put_at = RECORD.unpack_from(self._map, at)
            if (
                state != READY
                or revoked
                or pool != RING
                or DIGEST.unpack_from(self._map, PAGE + slot * DIGEST.size) != (digest,)
            ):
                return None
            start = self.layout.ring + offset
            try:
                if not nbytes or start + nbytes > len(self._map):
                    raise CorruptMessageError("the record of a message points outside its outbox")
                found = Arrival(bytearray(self._map[start : start + nbytes]), name, generation, put_at)
            except CorruptMessageError:
                self._set(slot, CONSUMED)
                raise
            self._set(slot, CONSUMED)
            return found
        finally:
            self._locks.release(at)

    def claim(self, slot: int, digest: int, holder: int) -> Record | None:
        """Lease a message in a pool to ``holder``; return None if it is not available any more, or is locked."""
        at = self._records + slot * RECORD_BYTES
        if not self._locks.acquire(at):
            return None
        try:
            record = self.record(slot)
            (found,) = DIGEST.unpack_from(self._map, PAGE + slot * DIGEST.size)
            if record.state != READY or record.revoked or found != digest or record.pool == RING:
                return None
            DIGEST.pack_into(self._map, at + HOLDER_AT, holder)
            self._set(slot, LEASED)
            return record
        finally:
            self._locks.release(at)

    def consume(self, slot: int, generation: int, holder: int) -> None:
        """End a lease, so that the sender can reuse the room."""
        record = self.record(slot)
        if record.state == LEASED and record.generation == generation and record.holder == holder:
            self._set(slot, CONSUMED)
