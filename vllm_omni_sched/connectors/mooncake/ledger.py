"""Records of the messages that one process has put into the store and that are not received yet; no library calls."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.keyed_lock import KeyedLock
from vllm_omni_sched.connectors.medium import EdgeCounts
from vllm_omni_sched.connectors.mooncake.buffers import BufferPool, PooledBuffer
from vllm_omni_sched.connectors.transport import InFlight, Traffic

READ_SECONDS = 60.0
"""Seconds for which a receiver may still read a message that was taken back."""


@dataclass(eq=False)
class Sent:
    """A message in flight; ``room`` holds our copy of it, if there still is one."""

    edge: Edge
    key: str
    name: bytes
    plain: str
    stored: str
    generation: int
    nbytes: int
    room: PooledBuffer | None
    put_at: float
    life: int  # of the beacon, in which it was put last
    readers: int = 0  # calls, of which some may hang, that read the copy: its room is not free before they end

    @property
    def linked(self) -> bool:
        return self.stored != self.plain


@dataclass
class OutboxCounts(EdgeCounts):
    """Counts of the outcomes of messages."""

    restored: int = 0  # put again after the master had lost them
    lost: int = 0  # by the master, when we had no copy
    handed_over: int = 0  # to another segment, at the end


class Ledger(KeyedLock):
    """Messages in flight, by name, by key and by the time of their last check, with a lock per name.

    1. While one thread puts or takes back a message of a name, other threads wait for that name.
    2. Copies of messages are dropped to make room for others, oldest first.
    """

    def __init__(self, buffers: BufferPool, clock: Clock) -> None:
        self._buffers, self._clock = buffers, clock
        super().__init__()
        self._taken_back: OrderedDict[bytes, float] = OrderedDict()
        self._by_key: dict[str, set[bytes]] = {}
        self._last: dict[Edge, Traffic] = {}  # the last received messages
        self.by_name: dict[bytes, Sent] = {}
        self.sent: OrderedDict[str, Sent] = OrderedDict()  # by stored key; the one checked longest ago comes first
        self.counts = OutboxCounts()
        self.token = secrets.randbits(32)
        self._count = 0

    def next_generation(self) -> int:
        with self._lock:
            self._count += 1
            return self.token << 32 | self._count & 0xFFFFFFFF

    def holds(self, sent: Sent) -> bool:
        return self.sent.get(sent.stored) is sent

    def waiting(self) -> list[Sent]:
        with self._lock:
            return list(self.sent.values())

    def oldest_looks(self, limit: int | None) -> list[Sent]:
        """Return the messages that were checked longest ago, and mark them as checked."""
        with self._lock:
            some = list(self.sent.values())[:limit]
            for sent in some:
                self.sent.move_to_end(sent.stored)
            return some

    def names_of(self, key: str) -> list[bytes]:
        with self._lock:
            return list(self._by_key.get(key, ()))

    def enter(self, sent: Sent) -> None:
        """Record a message in flight."""
        with self._lock:
            self.sent[sent.stored] = sent
            self.by_name[sent.name] = sent
            self._by_key.setdefault(sent.key, set()).add(sent.name)
            self.counts.waiting[sent.edge] += 1
            self.counts.waiting_bytes[sent.edge] += sent.nbytes

    def forget(self, sent: Sent) -> bool:
        """Remove a message and its copy from the records; return False if it was not recorded."""
        with self._lock:
            if self.sent.get(sent.stored) is not sent:
                return False
            del self.sent[sent.stored]
            if self.by_name.get(sent.name) is sent:
                del self.by_name[sent.name]
                names = self._by_key[sent.key]
                names.discard(sent.name)
                if not names:
                    del self._by_key[sent.key]
            self.counts.waiting[sent.edge] -= 1
            self.counts.waiting_bytes[sent.edge] -= sent.nbytes
            if sent.room is not None and not sent.readers:
                self._buffers.give_back(sent.room)
            sent.room = None
            return True

    def begins_to_read(self, sent: Sent) -> PooledBuffer | None:
        """Return the copy of a message for a call; None if there is none. See `has_read`."""
        with self._lock:
            if sent.room is not None:
                sent.readers += 1
            return sent.room

    def has_read(self, sent: Sent, room: PooledBuffer) -> None:
        """End a call's use of a copy; the copy of a message that was removed meanwhile is freed."""
        with self._lock:
            sent.readers -= 1
            if sent.room is None and not sent.readers:
                self._buffers.give_back(room)

    def take_copy(self, sent: Sent) -> PooledBuffer | None:
        """Return and drop the room of a message's copy; None while a call reads it."""
        with self._lock:
            if sent.readers:
                return None
            room, sent.room = sent.room, None
            return room

    def consumed(self, sent: Sent) -> bool:
        """Record that a message was received, and remove it; return False if it was not recorded."""
        if not self.forget(sent):
            return False
        self.counts.consumed += 1
        self._last.setdefault(sent.edge, Traffic()).got(sent.put_at, self._clock())
        return True

    def was_taken_back(self, name: bytes) -> None:
        """Record that a message was taken back, which a receiver may still be reading."""
        with self._lock:
            self._taken_back[name] = self._clock()
            self._taken_back.move_to_end(name)

    def is_fresh(self, name: bytes) -> bool:
        """Return whether no receiver can be reading under the plain key of a name."""
        now = self._clock()
        with self._lock:
            while self._taken_back:
                oldest, since = next(iter(self._taken_back.items()))
                if now - since < READ_SECONDS:
                    break
                del self._taken_back[oldest]
            return name not in self.by_name and name not in self._taken_back

    def release(self, nbytes: int) -> PooledBuffer | None:
        """Return room for a message; copies of others are dropped for it, and are lost if the master loses them."""
        if nbytes > self._buffers.nbytes:
            return None
        while (room := self._buffers.take(nbytes)) is None:
            with self._lock:
                copies = (sent for sent in self.by_name.values() if sent.room and not sent.readers)
                copied = next((sent for sent in copies if sent.name not in self._busy), None)
                if copied is None or copied.room is None:
                    return None
                self._buffers.give_back(copied.room)
                copied.room = None
        return room

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        waiting = self.waiting()
        return {
            **self.counts.facts(),
            "in_flight": len(waiting),
            "in_flight_bytes": sum(sent.nbytes for sent in waiting),
            "copies": sum(sent.room is not None for sent in waiting),
        }

    def traffic(self) -> dict[Edge, Traffic]:
        """Return the messages in flight by edge, as far as known."""
        with self._lock:
            found = {edge: replace(last, waiting=[]) for edge, last in self._last.items()}
            for sent in self.sent.values():
                found.setdefault(sent.edge, Traffic()).waiting.append(InFlight(sent.put_at, sent.nbytes))
        return found
