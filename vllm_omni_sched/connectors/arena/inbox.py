"""The receiving side of an arena: finds messages in everybody's outboxes."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import weakref
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.arena import layout as at
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.index import Index
from vllm_omni_sched.connectors.arena.layout import Layout, Record, State
from vllm_omni_sched.connectors.arena.memory import Memory, open_private
from vllm_omni_sched.connectors.framing import Arrival
from vllm_omni_sched.errors import CorruptMessageError

logger = logging.getLogger(__name__)

RING = 0
LISTING_SETTLES = 0.05
"""Seconds: a directory may change again within the tick of its time stamp."""


@dataclass
class InboxCounts:
    """What this process has received."""

    got: int = 0
    got_bytes: int = 0
    copied_bytes: int = 0
    corrupt: int = 0
    foreign: int = 0  # files in the arena that are no outbox of ours


@dataclass
class _Sender:
    """Somebody's outbox, mapped."""

    path: Path
    memory: Memory
    layout: Layout
    index: Index
    pools: dict[int, Memory] = field(default_factory=dict)

    def region(self, record: Record) -> memoryview:
        """Where a message lies.

        Raises:
            CorruptMessageError: it is said to lie outside the outbox.
        """
        memory, start = self.memory, self.layout.ring + record.offset
        if record.pool != RING:
            memory, start = self._pool(record.pool), record.offset
        if start + record.nbytes > len(memory.view):
            raise CorruptMessageError("a message is said to lie outside its outbox")
        return memory.view[start : start + record.nbytes]

    def _pool(self, number: int) -> Memory:
        if number not in self.pools:
            fd = open_private(self.path.parent / f"{self.path.stem}.{number}{meeting.POOL}")
            if fd is None:
                raise CorruptMessageError("a message is said to lie in a pool that is not there")
            nbytes = os.fstat(fd).st_size
            self.pools[number] = Memory(fd, nbytes, nbytes)
        return self.pools[number]

    def close(self) -> None:
        for memory in (*self.pools.values(), self.memory):
            memory.close()


class Inbox:
    """Messages for one process. Its callers hold one lock (see `ArenaPath`).

    Args:
        directory: of the arena.
        copy_out: always copy; else only what is in a ring, whose room is wanted back at once.
    """

    def __init__(self, directory: Path, copy_out: bool, clock: Clock) -> None:
        self._directory, self._copy_out, self._clock = directory, copy_out, clock
        token = secrets.token_hex(8)
        self.holder = int(token, 16)
        self.path = directory / f"{token}{meeting.INBOX}"
        unfinished = directory / f"{token}.new"
        self._fd = meeting.create(unfinished, 0)
        meeting.live(self._fd)
        unfinished.rename(self.path)
        self._senders: dict[str, _Sender] = {}
        self._ignored: set[str] = set()
        self._listed_stamp, self._listed_at = -1, -1.0
        self.counts = InboxCounts()

    def get(self, name: bytes) -> Arrival | None:
        """The message of that name, or None; see `Path.get`.

        Raises:
            CorruptMessageError: what lies there under its digest is damaged; it is gone now.
        """
        digest = at.digest_of(name)
        found = self._find(digest, name)
        if found is None and self._list():
            found = self._find(digest, name)
        return found

    def bury(self) -> int:
        """Take away outboxes of dead senders from which everything has been got; how many."""
        gone = 0
        for name, sender in list(self._senders.items()):
            if meeting.is_alive(sender.path):
                continue
            states = {sender.index.state(slot) for slot in range(sender.layout.slots)}
            if states <= {State.FREE, State.CONSUMED}:
                meeting.remove_member(sender.path)
                sender.close()
                del self._senders[name]
                gone += 1
        return gone

    def facts(self) -> dict[str, Any]:
        """Numbers for `Health.facts`."""
        return {**vars(self.counts), "senders": len(self._senders)}

    def close(self) -> None:
        """Let go of all outboxes; views of messages stay valid, and count as consumed when they go."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        self.path.unlink(missing_ok=True)
        meeting.let_go(self._fd)
        os.close(self._fd)

    def _find(self, digest: int, name: bytes) -> Arrival | None:
        for sender in self._senders.values():
            for slot, seen in sender.index.find(digest):
                if seen.state != State.READY:
                    continue
                record = sender.index.claim(slot, digest, self.holder)
                if record is not None:
                    return self._take(sender, slot, record, name)
        return None

    def _take(self, sender: _Sender, slot: int, record: Record, name: bytes) -> Arrival:
        copied = self._copy_out or record.pool == RING
        consume = partial(sender.index.consume, slot, record.generation, self.holder)
        try:
            region = sender.region(record)
            # an array of its own over the region: all views of the message keep it, and the lease ends with it
            data = bytearray(region) if copied else np.frombuffer(region, np.uint8)
            arrival = Arrival(data, name, record.generation)
        except CorruptMessageError:
            consume()
            self.counts.corrupt += 1
            raise
        if copied:
            self.counts.copied_bytes += record.nbytes
            consume()
        else:
            weakref.finalize(data, consume).atexit = False
        self.counts.got += 1
        self.counts.got_bytes += record.nbytes
        return arrival

    def _list(self) -> bool:
        """Whether there are outboxes that were not known."""
        stamp = os.stat(self._directory).st_mtime_ns
        now = self._clock()
        if stamp == self._listed_stamp and now - self._listed_at > LISTING_SETTLES:
            return False
        if stamp != self._listed_stamp:
            self._listed_stamp, self._listed_at = stamp, now
        known = len(self._senders)
        for entry in os.scandir(self._directory):
            if entry.name.endswith(meeting.OUTBOX) and not self._knows(entry.name):
                self._open(entry)
        return len(self._senders) > known

    def _knows(self, name: str) -> bool:
        return name in self._senders or name in self._ignored

    def _open(self, entry: os.DirEntry[str]) -> None:
        fd = None
        with contextlib.suppress(OSError):
            fd = open_private(Path(entry.path))
        if fd is None:
            return
        nbytes = os.fstat(fd).st_size
        layout = None
        if meeting.is_private(fd) and nbytes >= at.PAGE:
            magic, version, slots, ring, ring_bytes, _ = at.HEAD.unpack(os.pread(fd, at.HEAD.size, 0))
            if (magic, version) == (at.MAGIC, at.VERSION) and 0 < slots <= 1 << 20:
                layout = Layout.of(slots, ring_bytes)
                if (layout.slots, layout.ring, layout.nbytes) != (slots, ring, nbytes):
                    layout = None
        if layout is None:
            os.close(fd)
            self._ignored.add(entry.name)
            self.counts.foreign += 1
            logger.error("%s is no outbox of this arena and is left alone", entry.path)
            return
        memory = Memory(fd, nbytes, nbytes)
        self._senders[entry.name] = _Sender(Path(entry.path), memory, layout, Index(memory, layout))
