"""The receiving side of an arena: messages are found in the outboxes of all senders; failed searches are cached."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors.arena import index as at
from vllm_omni_sched.connectors.arena import meeting, tuning
from vllm_omni_sched.connectors.arena.index import NEWS_WORD, RING, Index, Layout, Record, State, is_late
from vllm_omni_sched.connectors.arena.memory import Memory, modified_ns, open_private, size_of
from vllm_omni_sched.connectors.arena.tuning import ReceivingCost
from vllm_omni_sched.connectors.framing import ON_DEVICE, Arrival, flags_of
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


LOOK_AGAIN = 0.05
"""Seconds after which a message is searched for again although its senders report nothing new."""
REMEMBERED = 4096
"""Largest number of cached misses."""


class Miss(NamedTuple):
    """A message that was not found, and the counters of its senders then (`Index.news`), in real time."""

    digest: int
    news: list[int]
    at: float


Shown = list[tuple[str, bytes]]
"""Counters of all senders, with the names of their files (`Index.all_news`)."""


def _changed(before: Shown, now: Shown) -> set[int] | None:
    """Return which counters have changed; None if other senders are known now."""
    if before == now:
        return set()
    if [name for name, _ in before] != [name for name, _ in now]:
        return None
    old, new = (np.frombuffer(b"".join(news for _, news in shown), np.uint32) for shown in (before, now))
    return set((np.flatnonzero(old != new) % at.NEWS_KINDS).tolist())


@dataclass
class Peer:
    """The mapped outbox of another process."""

    path: Path
    memory: Memory
    layout: Layout
    index: Index
    pools: dict[int, Memory] = field(default_factory=dict)

    def region(self, record: Record) -> memoryview:
        """Return the memory of a message.

        Raises:
            CorruptMessageError: its record points outside the outbox.
        """
        if record.pool == RING:
            raise CorruptMessageError("a message was moved or replaced while it was read")
        memory, start = self._pool(record.pool), record.offset
        there = min(len(memory.view), size_of(memory.fd))
        end = start + record.nbytes
        if not record.nbytes or end > there:
            raise CorruptMessageError("the record of a message points outside its outbox")
        return memory.view[start : start + record.nbytes]

    def _pool(self, number: int) -> Memory:
        if number not in self.pools:
            fd = open_private(self.path.parent / f"{self.path.stem}.{number}{meeting.POOL}")
            if fd is None:
                raise CorruptMessageError("the record of a message names a pool that does not exist")
            nbytes = os.fstat(fd).st_size
            if not nbytes or not meeting.is_private(fd):
                os.close(fd)
                raise CorruptMessageError("the record of a message names an invalid pool")
            self.pools[number] = mapped(fd, nbytes)
        return self.pools[number]

    def close(self) -> None:
        """Unmap the memory that no view uses."""
        for memory in (*self.pools.values(), self.memory):
            memory.close()


def mapped(fd: int, nbytes: int) -> Memory:
    """Map another process's file; close its descriptor if that fails."""
    try:
        return Memory(fd, nbytes, nbytes)
    except BaseException:
        os.close(fd)
        raise


def layout_of(fd: int, nbytes: int) -> Layout | None:
    """Return the layout of another process's outbox; None if it is not an outbox of this version."""
    if not meeting.is_private(fd) or nbytes < at.PAGE:
        return None
    magic, version, slots, ring, ring_bytes, _ = at.HEAD.unpack(os.pread(fd, at.HEAD.size, 0))
    if (magic, version) != (at.MAGIC, at.VERSION) or not 0 < slots <= 1 << 20:
        return None
    layout = Layout.of(slots, ring_bytes)
    return layout if (layout.slots, layout.ring, layout.nbytes) == (slots, ring, nbytes) else None


TELL_EVERY = 64
"""Number of messages after which senders are told the cost of receiving."""
NEW_SENDERS_AFTER = 1e-4
"""Seconds, of real time, between two searches for new senders: less than a sender takes to start."""
LISTING_SETTLES = 0.05
"""Seconds: a directory may change again within the tick of its time stamp."""


@dataclass
class InboxCounts:
    """Counts of the messages that this process has received."""

    got: int = 0
    got_bytes: int = 0
    copied_bytes: int = 0
    corrupt: int = 0
    foreign: int = 0  # files in the arena that are not outboxes of this version
    orphans_expired: int = 0  # messages of dead senders that expired
    orphans_given_back: int = 0  # messages of dead senders that dead receivers had leased


class Inbox:
    """Receiver of the messages of one process; callers hold the lock of `ArenaTransport`.

    The process counts as alive until the inbox is closed and the last view of a message is dropped.

    Args:
        directory: directory of the arena.
        listed: descriptor of the directory.
        copy_out: whether to copy all messages; else only those in a ring, whose room is needed again at once.
        ttl_seconds: age at which unreceived messages of dead senders are dropped.
    """

    def __init__(self, directory: Path, listed: int, copy_out: bool, ttl_seconds: float, clock: Clock) -> None:
        self._listed = listed
        self._directory, self._copy_out, self._ttl_seconds, self._clock = directory, copy_out, ttl_seconds, clock
        token = secrets.token_hex(8)
        self.holder = int(token, 16)
        self.path = directory / f"{token}{meeting.INBOX}"
        unfinished = directory / f"{token}{meeting.UNFINISHED}"
        with contextlib.ExitStack() as undo:
            os.close(meeting.create(unfinished, 0))
            undo.callback(unfinished.unlink, missing_ok=True)
            self._life = [meeting.live(unfinished)]
            undo.callback(meeting.let_go, *self._life)
            unfinished.rename(self.path)
            undo.pop_all()
        self._pid = os.getpid()
        self._leases: set[int] = set()  # numbers of the leases that have not ended
        self._closed = False
        self._senders: dict[str, Peer] = {}
        self._words: list[memoryview] = []  # `Index.words` of the senders
        self._ignored: set[str] = set()
        self._listed_stamp, self._listed_at, self._looked_at = -1, -1.0, -1.0
        self._owed: list[tuple[Index, int]] = []  # messages that must still be given back
        self._misses: dict[bytes, Miss] = {}
        self._contended = False  # the last search found a message that another process had locked
        self.counts = InboxCounts()
        self._cost = ReceivingCost()

    def get(self, name: bytes) -> Arrival | None:
        """Return the message of that name, or None; see `Transport.get`.

        Raises:
            CorruptMessageError: the message found under its digest is damaged; it has been dropped.
        """
        if self._owed:  # its sender had it locked
            self._owed = [one for one in self._owed if self._owes(*one)]
        now = monotonic_seconds()
        miss = self._misses.get(name)
        digest = at.digest_of(name) if miss is None else miss.digest
        word = NEWS_WORD + digest % at.NEWS_KINDS
        news = [words[word] for words in self._words]  # see `Index.news`; read before the search
        found = None
        if miss is None or miss.news != news or now - miss.at > LOOK_AGAIN:
            self._contended = False
            found = self._find(digest, name)
            if found is None and not self._contended:
                self._missed(name, Miss(digest, news, now))
            elif miss is not None:
                self._misses.pop(name, None)
        if found is None and now - self._looked_at > NEW_SENDERS_AFTER and self._find_senders(now):
            found = self._find(digest, name)
        return found

    def shown(self) -> Shown:
        """Return the counters of all senders; they change when a message is shown. See `Index.news`."""
        self._find_senders(monotonic_seconds())
        return [(name, sender.index.all_news()) for name, sender in self._senders.items()]

    def may_be_there(self, names: Sequence[bytes], since: Shown | None) -> list[bool]:
        """Return, for each name, whether `get` may find its message.

        Args:
            since: `shown` before the last search for these names, which found none of them.
        """
        shown = self.shown()
        changed = _changed(since, shown) if since is not None else None
        if changed is not None and not changed:
            return [False] * len(names)
        indexes, found = [sender.index for sender in self._senders.values()], []
        for name in names:
            miss = self._misses.get(name)
            digest = at.digest_of(name) if miss is None else miss.digest
            may = changed is None or digest % at.NEWS_KINDS in changed
            found.append(may and any(index.find(digest) for index in indexes))
        return found

    def bury(self) -> int:
        """Remove outboxes of dead senders whose messages were all received; return the number of outboxes."""
        gone = 0
        self._listed_stamp = -1  # list again, even if time stamps are unchanged
        for name, sender in list(self._senders.items()):
            if meeting.is_alive(sender.path):
                continue
            self._settle(sender.index)
            states = sender.index.columns().state
            if not np.isin(states, (State.READY, State.LEASED)).any():
                meeting.remove_member(sender.path)
                self._owed = [one for one in self._owed if one[0] is not sender.index]
                del self._senders[name]
                self._words = [other.index.words for other in self._senders.values()]
                sender.close()
                gone += 1
        meeting.tidy(self._directory, self.path)
        return gone

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        return {**vars(self.counts), "senders": len(self._senders)}

    def close(self) -> None:
        """Close all outboxes; views of messages stay valid, and count as consumed when they are dropped."""
        self._closed = True
        self.abandon()
        if not self._leases:
            self._leave()

    def abandon(self) -> None:
        """Release the resources that a forked child has inherited."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        self._words.clear()
        self._owed.clear()

    def _leave(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may drop the last two views at once
            life = self._life.pop()
            self.path.unlink(missing_ok=True)
            meeting.let_go(life)

    def _end(self, lease: int, index: Index, slot: int, generation: int) -> None:
        """Consume a message when its last view is dropped: in any thread, at any time, so it takes no lock."""
        if os.getpid() != self._pid:  # a forked child has dropped its copy of the view
            return
        started = self._clock()
        index.consume(slot, generation, self.holder)
        self._leases.discard(lease)
        self._cost.ended(self._clock() - started)
        if self._closed and not self._leases:
            self._leave()

    def _settle(self, index: Index) -> None:
        """Act for a dead sender: show messages of dead receivers again, drop messages that were not received in
        time.
        """
        state, holder, put_at = index.columns()
        late = (state == State.READY) & is_late(put_at, self._clock(), self._ttl_seconds)
        for slot in np.flatnonzero(late).tolist():
            self.counts.orphans_expired += index.withdraw(slot) == State.READY
        leased = state == State.LEASED
        for number in np.unique(holder[leased]).tolist():
            if number != self.holder and not meeting.is_alive(self._directory / f"{number:016x}{meeting.INBOX}"):
                for slot in np.flatnonzero(leased & (holder == number)).tolist():
                    self.counts.orphans_given_back += index.give_back(slot, number)

    def _owes(self, index: Index, slot: int) -> bool:
        if index.give_back(slot, self.holder):
            return False
        record = index.record(slot)
        return record.state == State.LEASED and record.holder == self.holder

    def _missed(self, name: bytes, miss: Miss) -> None:
        """Cache a miss. Long names are not cached."""
        if len(name) <= at.LONG_NAME:
            if len(self._misses) >= REMEMBERED:
                self._misses.clear()
            self._misses[name] = miss

    def _find(self, digest: int, name: bytes) -> Arrival | None:
        for sender in self._senders.values():
            taken = self._find_in(sender, digest, name)
            if taken is not None:
                return taken
        return None

    def _find_in(self, sender: Peer, digest: int, name: bytes) -> Arrival | None:
        """Return the message if this sender has it: a copy out of the ring, or a view of a pool."""
        index = sender.index
        for slot in index.find(digest):
            if index.is_inline(slot):
                started = self._clock()
                try:
                    found = index.take(slot, digest, name)
                except CorruptMessageError:
                    self.counts.corrupt += 1
                    raise
                if found is not None:
                    self._copied(found, started)
                    return found
            else:
                record = index.claim(slot, digest, self.holder)
                if record is not None:
                    return self._take(sender, slot, record, name)
            self._contended = True  # another process has it locked, and may not take it
        return None

    def _copied(self, arrival: Arrival, started: float) -> None:
        """Count a message that was copied out of the ring."""
        counts, nbytes = self.counts, arrival.nbytes
        counts.copied_bytes += nbytes
        counts.got += 1
        counts.got_bytes += nbytes
        self._cost.copied(nbytes, self._clock() - started)
        if counts.got % TELL_EVERY == 0:
            self._tell()

    def _tell(self) -> None:
        """Publish the measured limit for senders."""
        if (limit := self._cost.limit_bytes) is not None:
            with contextlib.suppress(OSError):
                tuning.tell(self.path, limit)

    def _take(self, sender: Peer, slot: int, record: Record, name: bytes) -> Arrival:
        copied, started = self._copy_out, self._clock()
        try:
            region = sender.region(record)
            # memory on a device is kept as long as the message is leased
            consumed = copied and not flags_of(region) & ON_DEVICE
            # an array of its own over the region: all views of the message keep it, and the lease ends with it
            data = bytearray(region) if consumed else np.frombuffer(bytes(region) if copied else region, np.uint8)
            arrival = Arrival(data, name, record.generation, record.put_at)
        except CorruptMessageError:
            sender.index.consume(slot, record.generation, self.holder)
            self.counts.corrupt += 1
            raise
        except BaseException:  # no memory or descriptors: it can be received once there are some
            if not sender.index.give_back(slot, self.holder):
                self._owed.append((sender.index, slot))
            raise
        if copied:
            self.counts.copied_bytes += record.nbytes
        if consumed:
            sender.index.consume(slot, record.generation, self.holder)
        else:
            lease = self.counts.got
            self._leases.add(lease)
            weakref.finalize(data, self._end, lease, sender.index, slot, record.generation).atexit = False
            self._cost.viewed(self._clock() - started)
        self.counts.got += 1
        self.counts.got_bytes += record.nbytes
        return arrival

    def _find_senders(self, now: float) -> bool:
        """Search for new outboxes if the last search was a while ago; return whether there are any."""
        if now - self._looked_at <= NEW_SENDERS_AFTER:
            return False
        self._looked_at = now
        return self._list()

    def _list(self) -> bool:
        """Search for new outboxes; return whether there are any."""
        stamp = modified_ns(self._listed)
        now = self._clock()
        if stamp == self._listed_stamp and now - self._listed_at > LISTING_SETTLES:
            return False
        if stamp != self._listed_stamp:
            self._listed_stamp, self._listed_at = stamp, now
        known = len(self._senders)
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    if entry.name.endswith(meeting.OUTBOX) and not self._knows(entry.name):
                        self._open(entry)
        except OSError:
            self._listed_stamp = -1  # list again next time
            raise
        return len(self._senders) > known

    def _knows(self, name: str) -> bool:
        return name in self._senders or name in self._ignored

    def _open(self, entry: os.DirEntry[str]) -> None:
        try:
            fd = open_private(Path(entry.path))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            self._ignore(entry)
            return
        if fd is None:
            return
        nbytes = os.fstat(fd).st_size
        layout = layout_of(fd, nbytes)
        if layout is None:
            os.close(fd)
            self._ignore(entry)
            return
        memory = mapped(fd, nbytes)
        index = Index(memory, layout)
        self._senders[entry.name] = Peer(Path(entry.path), memory, layout, index)
        self._words.append(index.words)

    def _ignore(self, entry: os.DirEntry[str]) -> None:
        self._ignored.add(entry.name)
        self.counts.foreign += 1
        logger.error("%s is not an outbox of this arena; ignoring it, its messages are not received", entry.path)
