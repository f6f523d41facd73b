"""Records of the messages that one process has put into the store and that are not received yet; no library calls."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.medium import EdgeCounts
from vllm_omni_sched.connectors.transport import InFlight, Traffic

READ_SECONDS = 60.0
"""Seconds for which a receiver may still read a message that was taken back."""


@dataclass(eq=False)
class Sent:
    """A message in flight."""

    edge: Edge
    key: str
    name: bytes
    plain: str
    stored: str
    generation: int
    nbytes: int
    put_at: float
    life: int  # of the beacon, in which it was put

    @property
    def linked(self) -> bool:
        return self.stored != self.plain


@dataclass
class OutboxCounts(EdgeCounts):
    """Counts of the outcomes of messages."""

    lost: int = 0  # by the master, or with this process's segment
    handed_over: int = 0  # to another segment, at the end


class Ledger:
    """Messages in flight, by name, by key and by the time of their last check, with a lock per name.

    While one thread puts or takes back a message of a name, other threads wait for that name.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Condition()
        self._busy: set[bytes] = set()  # names that are locked
        self._taken_back: OrderedDict[bytes, float] = OrderedDict()
        self._by_key: dict[str, set[bytes]] = {}
        self._last: dict[Edge, Traffic] = {}  # the last received messages
        self.by_name: dict[bytes, Sent] = {}
        self.sent: OrderedDict[str, Sent] = OrderedDict()  # by stored key; the one checked longest ago comes first
        self.counts = OutboxCounts()
        self.token = secrets.randbits(32)
        self._count = 0

    @contextmanager
    def alone(self, name: bytes) -> Iterator[None]:
        """Lock a name for the block."""
        with self._lock:
            self._lock.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(name)
                self._lock.notify_all()

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
        """Remove a message from the records; return False if it was not recorded."""
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
            return True

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

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        waiting = self.waiting()
        return {
            **self.counts.facts(),
            "in_flight": len(waiting),
            "in_flight_bytes": sum(sent.nbytes for sent in waiting),
        }

    def traffic(self) -> dict[Edge, Traffic]:
        """Return the messages in flight by edge, as far as known."""
        with self._lock:
            found = {edge: replace(last, waiting=[]) for edge, last in self._last.items()}
            for sent in self.sent.values():
                found.setdefault(sent.edge, Traffic()).waiting.append(InFlight(sent.put_at, sent.nbytes))
        return found
