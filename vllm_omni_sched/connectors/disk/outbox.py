"""The sending side: the messages that one process has put into files."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.disk import files
from vllm_omni_sched.connectors.disk.members import Members
from vllm_omni_sched.connectors.disk.options import DiskOptions
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.keyed_lock import KeyedLock
from vllm_omni_sched.connectors.medium import MessageCounts
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Sent:
    """A message in flight."""

    edge: Edge
    key: str
    name: bytes
    nbytes: int
    generation: int
    stamp: files.Stamp
    put_at: float


class Outbox(KeyedLock):
    """Sender of the messages of one process. The lock guards its records, and is never held while bytes are written."""

    def __init__(self, members: Members, options: DiskOptions, clock: Clock) -> None:
        self._members, self._options, self._clock = members, options, clock
        super().__init__()
        self._leased: set[int] = set()  # generations
        self._count = 0
        self.used_bytes = 0  # of messages, and of those that are being written
        self.sent: OrderedDict[bytes, Sent] = OrderedDict()  # by name; the message checked longest ago comes first
        self._by_key: dict[str, set[bytes]] = {}
        self.waiting: Counter[Edge] = Counter()
        self.counts = MessageCounts()
        self.progress = 0  # messages gone: it tells whether there may be room again

    def put(self, message: Message) -> bool:
        """Write a message and show it to receivers; return False if that would exceed ``max_bytes``.

        Raises:
            OSError: the file system does not take it; nothing has changed.
        """
        name, nbytes = message.name, message.nbytes
        with self._lock:
            if self.used_bytes + nbytes > self._options.max_bytes:
                return False
            self.used_bytes += nbytes
            self._count += 1
            generation = self._members.number << 32 | self._count & 0xFFFFFFFF
        entered = False
        try:
            path, put_at = self._members.own_file(name, files.UNFINISHED), self._clock()
            stamp = files.write(path, message, generation, put_at, self._options.checksum)
            with self.alone(name):
                before = self.sent.get(name)
                if before is not None:
                    was_there = self._take_back(before)
                    self._forget(before, "replaced" if was_there else "consumed")
                os.rename(path, self._members.message(name))
                self._enter(Sent(message.edge, message.key, name, nbytes, generation, stamp, put_at))
                entered = True
        finally:
            if not entered:
                with self._lock:
                    self.used_bytes -= nbytes
        return True

    def holds(self, name: bytes) -> bool:
        """Return whether a message of this process waits under that name."""
        sent = self.sent.get(name)
        return sent is not None and self._waits(sent)

    def lease(self, name: bytes) -> tuple[int, Path] | None:
        """Lease a message that was not received; return its generation, and its path until `end_lease`.

        Raises:
            OSError: it cannot be renamed; nothing has changed.
        """
        with self.alone(name):
            sent = self.sent.get(name)
            if sent is None or sent.generation in self._leased:
                return None
            self._leased.add(sent.generation)  # before the rename, after which `reap` would consider it received
            taken = None
            try:
                taken = self._take(sent)
            finally:
                if taken is None:
                    self._leased.discard(sent.generation)
            return None if taken is None else (sent.generation, taken)

    def end_lease(self, name: bytes, generation: int, taken: Path, returned: bool) -> bool:
        """Show a leased message to receivers again, or drop it; return whether it can be received again."""
        with self.alone(name):
            self._leased.discard(generation)
            sent = self.sent.get(name)
            ours = sent is not None and sent.generation == generation
            if returned and ours and files.rename_if_free(taken, self._members.message(name)):
                return True
            taken.unlink(missing_ok=True)
            if ours and sent is not None:
                self._forget(sent, "consumed")
            return False

    def withdraw(self, name: bytes) -> bool:
        """Take back the message of that name; return False if it was received."""
        return self._withdraw(name, "discarded")

    def discard(self, key: str) -> int:
        """Take back the messages under ``key`` that were not received, on all edges; return how many."""
        with self._lock:
            names = list(self._by_key.get(key, ()))
        return sum(self._withdraw(name, "discarded") for name in names)

    def reap(self, limit: int | None = None) -> int:
        """Check ``limit`` messages, longest unchecked first, and drop the records of finished ones; return how many."""
        with self._lock:
            before, now = self.progress, self._clock()
            some = [sent for sent in islice(self.sent.values(), limit) if sent.generation not in self._leased]
            for sent in some:
                self.sent.move_to_end(sent.name)
        for sent in some:
            if now - sent.put_at > self._options.ttl_seconds:
                if self._withdraw(sent.name, "expired"):
                    logger.warning(
                        "message %r of edge %s expired, because it was not received in time", sent.key[:80], sent.edge
                    )
            elif not self._waits(sent):
                with self.alone(sent.name):
                    if sent.generation not in self._leased and not self._waits(sent):  # nor was it meanwhile
                        self._forget(sent, "consumed")
        return self.progress - before

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        return {**vars(self.counts), "in_flight": len(self.sent), "in_flight_bytes": self.used_bytes}

    def abandon(self) -> None:
        """Release the resources that a forked child has inherited."""
        self.forget_locks()

    def _withdraw(self, name: bytes, why: str) -> bool:
        """Take back one message; return False if it was received."""
        with self.alone(name):
            sent = self.sent.get(name)
            if sent is None or (why == "expired" and sent.generation in self._leased):
                return False
            taken_back = self._take_back(sent)
            self._forget(sent, why if taken_back else "consumed")
            return taken_back

    def _waits(self, sent: Sent) -> bool:
        return files.stamp_of(self._members.message(sent.name)) == sent.stamp

    def _take_back(self, sent: Sent) -> bool:
        """Remove a message; return whether it was still there."""
        taken = self._take(sent)
        if taken is not None:
            taken.unlink()
        return taken is not None

    def _take(self, sent: Sent) -> Path | None:
        """Take a message back; return its path now, None if it was received."""
        path, taken = self._members.message(sent.name), self._members.own_file(sent.name, files.TAKEN)
        if not self._waits(sent):
            return None
        try:
            os.rename(path, taken)
        except FileNotFoundError:
            return None
        if files.stamp_of(taken) != sent.stamp:  # another process has put it meanwhile
            files.rename_if_free(taken, path)
            return None
        return taken

    def _enter(self, sent: Sent) -> None:
        with self._lock:
            self.sent[sent.name] = sent
            self._by_key.setdefault(sent.key, set()).add(sent.name)
            self.waiting[sent.edge] += 1
            self.counts.put += 1
            self.counts.put_bytes += sent.nbytes

    def _forget(self, sent: Sent, why: str) -> None:
        """Remove a message from the records, once."""
        with self._lock:
            if self.sent.get(sent.name) is not sent:
                return
            del self.sent[sent.name]
            names = self._by_key[sent.key]
            names.discard(sent.name)
            if not names:
                del self._by_key[sent.key]
            self.waiting[sent.edge] -= 1
            self.used_bytes -= sent.nbytes
            self.progress += 1
            setattr(self.counts, why, getattr(self.counts, why) + 1)
