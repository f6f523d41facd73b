"""The index of an outbox in shared memory: which message lies where, and whose it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from vllm_omni_sched.connectors.arena.layout import (
    BUCKET,
    DIGEST,
    DIGESTS,
    HOLDER_AT,
    RECORD,
    STATE,
    Layout,
    Record,
    State,
    buckets_of,
)
from vllm_omni_sched.connectors.arena.memory import ByteLocks, Memory


class Index:
    """Slots of an outbox, as sender and receivers see them.

    States change under the lock of the slot's first byte where two could want it, and without where only one may: the
    sender fills free slots, a receiver ends its own lease.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        self._map, self.layout = memory.map, layout
        self._locks = ByteLocks(memory.fd)
        self._order = threading.Lock()

    def find(self, digest: int) -> Iterator[tuple[int, Record]]:
        """Slots with this digest, whatever their state; there may be an old one that was not freed yet."""
        for bucket in dict.fromkeys(buckets_of(digest, self.layout.buckets)):
            first = bucket * BUCKET
            digests = DIGESTS.unpack_from(self._map, self.layout.digest_at(first))
            if digest in digests:
                for place, found in enumerate(digests):
                    if found == digest:
                        yield first + place, self.record(first + place)

    def record(self, slot: int) -> Record:
        """What a slot says now."""
        return Record(*RECORD.unpack_from(self._map, self.layout.record_at(slot)))

    def state(self, slot: int) -> int:
        """Of a slot, now."""
        return int(STATE.unpack_from(self._map, self.layout.record_at(slot))[0])

    # the sender's

    def publish(self, slot: int, digest: int, record: Record) -> None:
        """Show a message that is written to receivers."""
        with self._order:  # its release puts all writes before it in front of the one after it
            RECORD.pack_into(self._map, self.layout.record_at(slot), State.FREE, *record[1:])
            DIGEST.pack_into(self._map, self.layout.digest_at(slot), digest)
        STATE.pack_into(self._map, self.layout.record_at(slot), State.READY)

    def withdraw(self, slot: int) -> bool:
        """Free a slot that no receiver has; False when one has it, or is just taking it."""
        at = self.layout.record_at(slot)
        if not self._locks.acquire(at, wait=False):
            return False
        try:
            if self.state(slot) == State.LEASED:
                return False
            self.free(slot)
            return True
        finally:
            self._locks.release(at)

    def free(self, slot: int) -> None:
        """Empty a slot that is nobody's any more."""
        STATE.pack_into(self._map, self.layout.record_at(slot), State.FREE)
        DIGEST.pack_into(self._map, self.layout.digest_at(slot), 0)

    def give_back(self, slot: int, holder: int) -> bool:
        """Show a message again whose receiver has died."""
        at = self.layout.record_at(slot)
        if not self._locks.acquire(at, wait=False):
            return False
        try:
            record = self.record(slot)
            if record.state != State.LEASED or record.holder != holder:
                return False
            STATE.pack_into(self._map, at, State.READY)
            return True
        finally:
            self._locks.release(at)

    # a receiver's

    def claim(self, slot: int, digest: int, holder: int) -> Record | None:
        """Lease a message to ``holder``; None when it is not there to be had any more."""
        at = self.layout.record_at(slot)
        self._locks.acquire(at)
        try:
            record = self.record(slot)
            (found,) = DIGEST.unpack_from(self._map, self.layout.digest_at(slot))
            if record.state != State.READY or found != digest:
                return None
            DIGEST.pack_into(self._map, at + HOLDER_AT, holder)
            STATE.pack_into(self._map, at, State.LEASED)
            return record
        finally:
            self._locks.release(at)

    def consume(self, slot: int, generation: int, holder: int) -> None:
        """End a lease: the sender may have the room again."""
        record = self.record(slot)
        if record.state == State.LEASED and record.generation == generation and record.holder == holder:
            STATE.pack_into(self._map, self.layout.record_at(slot), State.CONSUMED)
