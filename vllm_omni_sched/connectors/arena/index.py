"""The index of an outbox in shared memory: which message lies where, and whose it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.connectors.arena.layout import (
    BUCKET,
    DIGEST,
    HOLDER_AT,
    NEWS,
    NEWS_AT,
    NEWS_KINDS,
    PAGE,
    POOL,
    POOL_AT,
    PUT_AT,
    RECORD,
    RECORD_BYTES,
    REVOKED,
    REVOKED_AT,
    RING,
    Layout,
    Record,
    State,
    buckets_of,
)
from vllm_omni_sched.connectors.arena.memory import ByteLocks, Memory
from vllm_omni_sched.errors import CorruptMessageError

Read = TypeVar("Read")
FUTURE = 1e6
"""Seconds that no clock of a host is ahead of another."""
WORDS = RECORD_BYTES // 4  # of a record; the first is its state

FREE, READY, LEASED, CONSUMED = (int(state) for state in State)  # an enumeration is slow to look up


class Columns(NamedTuple):
    """Of the records of all slots, as they were at one time."""

    state: npt.NDArray[Any]
    holder: npt.NDArray[Any]
    put_at: npt.NDArray[Any]


def is_late(put_at: npt.NDArray[Any], now: float, ttl_seconds: float) -> npt.NDArray[Any]:
    """Which messages were put more than ``ttl_seconds`` ago, or at a time that cannot be: somebody has damaged it."""
    sound = np.isfinite(put_at) & (put_at < now + FUTURE)
    late: npt.NDArray[Any] = ~sound | (now - np.where(sound, put_at, now) > ttl_seconds)
    return late


class Index:
    """Slots of an outbox, as sender and receivers see them.

    States change under the lock of the slot's first byte where two could want it, and without where only one may: the
    sender fills free slots, a receiver ends its own lease.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        # mapped as long as somebody's lease needs it: a mapping that has views cannot be closed
        self._bytes, self._map, self.layout = memory.map, memoryview(memory.map), layout
        words = np.frombuffer(self._map, "<u8", layout.slots * RECORD_BYTES // 8, layout.records)
        rows = words.reshape(layout.slots, RECORD_BYTES // 8)
        self._columns = Columns(rows.view("<u4")[:, 0], rows[:, HOLDER_AT // 8], rows.view("<f8")[:, PUT_AT // 8])
        self._buckets, self._records = layout.buckets, layout.records
        self._words, self._first = self._map.cast("I"), layout.records // 4
        self._locks = ByteLocks(memory.fd)
        self._order = threading.Lock()

    def find(self, digest: int) -> list[int]:
        """Slots with this digest whose message waits; others may have it that were not freed yet."""
        slots, wanted = [], DIGEST.pack(digest)
        for bucket in buckets_of(digest, self._buckets):
            start = PAGE + bucket * BUCKET * DIGEST.size
            end = start + BUCKET * DIGEST.size
            at = self._bytes.find(wanted, start, end)
            while at >= 0:
                slot, beside = divmod(at - PAGE, DIGEST.size)
                if not beside and self.state(slot) == READY:
                    slots.append(slot)
                at = self._bytes.find(wanted, at + 1, end)
        return slots

    def news(self, digest: int) -> int:
        """Another number once a message was shown that may have this digest.

        It may be late where processors reorder what they write, and processes that give back do not wait for each
        other: look now and then all the same.
        """
        (count,) = NEWS.unpack_from(self._map, NEWS_AT + digest % NEWS_KINDS * NEWS.size)
        return int(count)

    def record(self, slot: int) -> Record:
        """What a slot says now."""
        return Record(*RECORD.unpack_from(self._map, self._records + slot * RECORD_BYTES))

    def state(self, slot: int) -> int:
        """Of a slot, now."""
        return self._words[self._first + slot * WORDS]

    def settled(self, slot: int) -> int | None:
        """Of a slot, while nobody is at it; None when somebody is."""
        at = self.layout.record_at(slot)
        if not self._locks.acquire(at):
            return None
        try:
            return self.state(slot)
        finally:
            self._locks.release(at)

    def columns(self) -> Columns:
        """What all slots say now."""
        return Columns(*(column.copy() for column in self._columns))

    # the sender's; a receiver's, where the sender is dead

    def publish(self, slot: int, digest: int, record: tuple[Any, ...]) -> None:
        """Show a message that is written to receivers; ``record`` is a `Record` that is free."""
        at = self._records + slot * RECORD_BYTES
        with self._order:
            RECORD.pack_into(self._map, at, *record)
            DIGEST.pack_into(self._map, self.layout.digest_at(slot), digest)
        with self._order:  # released and taken again: no processor shows what follows before what went before
            self._set(slot, READY)
        self._tell(digest)

    def withdraw(self, slot: int) -> int | None:
        """Free a slot unless it is leased, and say what it was; None when somebody is at it, who may take it or not."""
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
        """Let nobody take a message but who is at it already: others find it revoked."""
        REVOKED.pack_into(self._map, self._records + slot * RECORD_BYTES + REVOKED_AT, 1)

    def free(self, slot: int) -> None:
        """Empty a slot that is nobody's any more."""
        self._set(slot, FREE)
        DIGEST.pack_into(self._map, self.layout.digest_at(slot), 0)

    def give_back(self, slot: int, holder: int) -> bool:
        """Show a message again whose receiver has died, or cannot take it."""
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
        """One store: `Struct.pack_into` writes zeros first, and others look without a lock."""
        self._words[self._first + slot * WORDS] = state

    def _tell(self, digest: int) -> None:
        with self._order:
            NEWS.pack_into(self._map, NEWS_AT + digest % NEWS_KINDS * NEWS.size, (self.news(digest) + 1) & 0xFFFFFFFF)

    # a receiver's

    def is_inline(self, slot: int) -> bool:
        """Whether the message of a slot is in the ring."""
        (pool,) = POOL.unpack_from(self._map, self._records + slot * RECORD_BYTES + POOL_AT)
        return bool(pool == RING)

    def take(self, slot: int, digest: int, read: Callable[[bytearray, int, float], Read]) -> Read | None:
        """Get a message out of the ring, in one step: whoever is killed in it has not got it.

        Args:
            read: is given a copy of the message, its generation, and when it was put.

        Returns:
            What ``read`` returns; None when the message is not there to be had any more, or somebody is at it.

        Raises:
            CorruptMessageError: of ``read``, or the message is said to lie outside the ring; it is gone now.
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
                    raise CorruptMessageError("a message is said to lie outside its outbox")
                found = read(bytearray(self._map[start : start + nbytes]), generation, put_at)
            except CorruptMessageError:
                self._set(slot, CONSUMED)
                raise
            self._set(slot, CONSUMED)
            return found
        finally:
            self._locks.release(at)

    def claim(self, slot: int, digest: int, holder: int, inline: bool = False) -> Record | None:
        """Lease a message to ``holder``; None when it is not there to be had any more, or somebody is at it.

        Args:
            inline: also one in the ring, which its sender alone may lease: receivers `take` it.
        """
        at = self._records + slot * RECORD_BYTES
        if not self._locks.acquire(at):
            return None
        try:
            record = self.record(slot)
            (found,) = DIGEST.unpack_from(self._map, PAGE + slot * DIGEST.size)
            if record.state != READY or record.revoked or found != digest or (record.pool == RING and not inline):
                return None
            DIGEST.pack_into(self._map, at + HOLDER_AT, holder)
            self._set(slot, LEASED)
            return record
        finally:
            self._locks.release(at)

    def consume(self, slot: int, generation: int, holder: int) -> None:
        """End a lease: the sender may have the room again."""
        record = self.record(slot)
        if record.state == LEASED and record.generation == generation and record.holder == holder:
            self._set(slot, CONSUMED)
