"""The sending side of an arena: the messages of one process in flight, and the receivers that have them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_omni_sched.clock import Clock, sleep_seconds
from vllm_omni_sched.connectors.arena import index as at
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.index import CONSUMED, LEASED, READY, RING, Index, State, is_late
from vllm_omni_sched.connectors.arena.options import ArenaOptions, Modality
from vllm_omni_sched.connectors.arena.storage import Storage
from vllm_omni_sched.connectors.arena.wake import WakeWords, word_of
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import ON_DEVICE, Message
from vllm_omni_sched.connectors.medium import EdgeCounts
from vllm_omni_sched.connectors.transport import InFlight, Traffic
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


ALIVE_FOR = 0.5
"""Seconds for which a receiver that was found alive is not checked again."""


class Sent(NamedTuple):
    """A message in flight."""

    slot: int
    edge: Edge
    key: str
    name: bytes
    pool: int
    offset: int
    nbytes: int
    put_at: float
    done: Callable[[], None] | None


@dataclass
class OutboxCounts(EdgeCounts):
    """Outcomes of messages; ``discarded`` includes messages that were received, and given back by dead receivers."""

    inline: int = 0
    given_back: int = 0  # by receivers that died
    damaged: int = 0  # records in the index that were damaged


class Receivers:
    """Short-lived cache of which receivers are alive.

    Args:
        directory: directory of the arena.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen_alive: dict[int, float] = {}

    def is_alive(self, holder: int, now: float) -> bool:
        seen = self._seen_alive.get(holder)
        if seen is not None and 0 <= now - seen < ALIVE_FOR:
            return True
        alive = meeting.is_alive(self._directory / f"{holder:016x}{meeting.INBOX}")
        if alive:
            self._seen_alive[holder] = now
        return alive

    def forget(self) -> None:
        """Drop the cache, so that all receivers are checked again."""
        self._seen_alive.clear()


FIRST_WAIT, LONGEST_WAIT, LOOKS = 50e-6, 2e-3, 50
"""Seconds between attempts to take back a message that is locked, and the number of attempts: a tenth of a second in
all. A lock is held for microseconds, unless its process is stopped."""


class Outbox:
    """Sender of the messages of one process; callers hold `ArenaTransport._send_lock`, receivers may act at any time.

    Args:
        directory: directory of the arena.

    Raises:
        OSError: no memory for the index and the ring.
    """

    def __init__(
        self, directory: Path, options: ArenaOptions, clock: Clock, sleep: Callable[[float], None] = sleep_seconds
    ) -> None:
        self._options, self._clock, self._sleep = options, clock, sleep
        self.storage = Storage(directory, options)
        self.layout = self.storage.layout
        self._index = Index(self.storage.memory, self.layout)
        self._checksum = options.checksum
        self._buckets = self.layout.buckets
        self._free = [list(range(b, b + at.BUCKET)) for b in range(0, self.layout.slots, at.BUCKET)]
        self._generation = 0
        self.sent: OrderedDict[int, Sent] = OrderedDict()  # by slot; the message checked longest ago comes first
        self._by_name: dict[bytes, int] = {}
        self._by_key: dict[str, set[int]] = {}
        self._got = bytearray(self.layout.slots)  # 1: the slot is known to be leased
        self._held_since: dict[int, float] = {}  # slots that are known to be leased
        self._last: dict[Edge, Traffic] = {}  # the last received message
        self._unwanted: set[int] = set()  # slots with messages that were discarded or replaced while they were leased
        self._receivers = Receivers(directory)
        self.counts = OutboxCounts()
        self.progress = 0  # number of messages received or removed: if it changes, there may be room again

    def can_hold(self, message: Message, modality: Modality) -> bool:
        """Return whether an empty outbox would have room for a message."""
        return self.storage.can_hold(message.nbytes, modality, may_be_inline=not message.flags & ON_DEVICE)

    def put(self, message: Message, modality: Modality, words: WakeWords | None = None) -> int | None:
        """Write a message and show it to receivers; return the bytes it takes, None if there is no room now.

        Args:
            words: where receivers of its edge sleep.
        """
        name, nbytes = message.name, message.nbytes
        # messages with memory on a device are leased, but messages in the ring are copied out at once
        place = self.storage.allocate(nbytes, modality, not message.flags & ON_DEVICE)
        if place is None:
            return None
        pool, offset, held_bytes = place
        generation = self._generation = self._generation % 0xFFFFFFFF + 1
        try:
            sent = self._send(message, pool, offset, generation)
        except BaseException:
            self.storage.free(pool, offset)
            raise
        if sent is None:
            self.storage.free(pool, offset)
            return None
        if words is not None:
            words.wake(word_of(message.edge))
        # from here on it can be received; the bookkeeping overlaps with the receiver
        slot, now = sent
        self._remember(Sent(slot, message.edge, message.key, name, pool, offset, nbytes, now, message.done))
        return held_bytes

    def _send(self, message: Message, pool: int, offset: int, generation: int) -> tuple[int, float] | None:
        """Write a message to its place and publish it; return its slot and the time, None if no slot is free."""
        name, nbytes = message.name, message.nbytes
        digest = at.digest_of(name)
        one, other = at.buckets_of(digest, self._buckets)
        free, others = self._free[one], self._free[other]
        if len(others) > len(free):
            free = others
        if not free:
            return None
        message.write_to(*self.storage.at(pool, offset, nbytes), generation, self._checksum)
        if name in self._by_name:
            self._replace(self._by_name[name])
        slot, now = free.pop(), self._clock()
        self._index.publish(slot, digest, generation, pool, offset, nbytes, now)
        return slot, now

    def discard(self, key: str) -> int:
        """Take back the messages under ``key`` that were not received, on all edges; return how many."""
        found = sum(self._take_back(slot) == State.READY for slot in list(self._by_key.get(key, ())))
        self.counts.discarded += found
        return found

    def withdraw(self, name: bytes) -> bool:
        """Take back the last message of that name; return False if it was received or is locked."""
        slot = self._by_name.get(name)
        found = slot is not None and self._take_back(slot) == State.READY
        self.counts.discarded += found
        return found

    def reap(self, limit: int | None = None) -> int:
        """Check ``limit`` messages, longest unchecked first, and free the room of finished ones; return how many."""
        before, now = len(self.sent), self._clock()
        if limit is None:
            self._receivers.forget()
            slots = self._worth_a_look(now)
        else:
            slots = list(islice(self.sent, limit))
        for slot in slots:
            self._look_at(slot, now)
        return before - len(self.sent)

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        return {**self.counts.facts(), "in_flight": len(self.sent), **self.storage.facts()}

    def traffic(self) -> dict[Edge, Traffic]:
        """Return the messages in flight by edge, as of the last `reap`."""
        found = {edge: replace(last, waiting=[], held=[]) for edge, last in self._last.items()}
        for sent in self.sent.values():
            traffic = found.setdefault(sent.edge, Traffic())
            since = self._held_since.get(sent.slot)
            if since is None:
                traffic.waiting.append(InFlight(sent.put_at, sent.nbytes))
            else:
                traffic.held.append(InFlight(since, sent.nbytes))
        return found

    def close(self) -> None:
        """End sending. Messages in flight stay for receivers; without any, the files are removed."""
        self.reap()
        self.storage.close(remove=not self.sent)

    def abandon(self) -> None:
        """Release the resources that a forked child has inherited."""
        self.storage.abandon()

    def _remember(self, sent: Sent) -> None:
        slot, edge, key, nbytes = sent.slot, sent.edge, sent.key, sent.nbytes
        self.sent[slot] = sent
        self._by_name[sent.name] = slot
        same_key = self._by_key.get(key)
        if same_key is None:
            self._by_key[key] = {slot}
        else:
            same_key.add(slot)
        counts = self.counts
        counts.waiting[edge] += 1
        counts.waiting_bytes[edge] += nbytes
        counts.put += 1
        counts.put_bytes += nbytes
        counts.inline += sent.pool == RING

    def _worth_a_look(self, now: float) -> list[int]:
        """Return all slots except free ones, and messages whose known state, waiting or held, is unchanged."""
        state, holder, put_at = self._index.columns()
        leased = state == State.LEASED
        dull = (state == State.FREE) | ((state == State.READY) & ~is_late(put_at, now, self._options.ttl_seconds))
        for number in np.unique(holder[leased]).tolist():
            if self._receivers.is_alive(number, now):
                dull |= leased & np.frombuffer(self._got, bool) & (holder == number)
        dull[list(self._unwanted)] = False  # to be taken back as soon as no receiver holds them
        return [int(slot) for slot in np.flatnonzero(~dull)]

    def _look_at(self, slot: int, now: float) -> None:
        sent = self.sent.get(slot)
        if sent is None:
            return
        self.sent.move_to_end(slot)
        state = self._index.state(slot)
        if state == READY:
            if slot in self._unwanted:
                self.counts.discarded += self._withdraw(slot) == State.READY
            elif now - sent.put_at > self._options.ttl_seconds and self._withdraw(slot) == State.READY:
                self.counts.expired += 1
                logger.warning(
                    "message %r of edge %s expired, because it was not received in time", sent.key[:80], sent.edge
                )
        elif state == LEASED:
            if slot not in self._held_since:
                self._held_since[slot] = now
                self._saw_got(sent, now)
            self._mark(sent, got=True)
            holder = self._index.record(slot).holder
            if not self._receivers.is_alive(holder, now):
                self._take_from_the_dead(sent, holder)
        else:
            if state != CONSUMED and self._index.settled(slot) != state:
                return  # another process has it locked
            if state != CONSUMED:
                self.counts.damaged += 1
            else:
                self.counts.consumed += 1
                if slot not in self._held_since:
                    self._saw_got(sent, now)
            self._forget(sent)

    def _saw_got(self, sent: Sent, now: float) -> None:
        last = self._last.get(sent.edge)
        if last is None:
            last = self._last[sent.edge] = Traffic()
        last.got(sent.put_at, now)

    def _replace(self, slot: int) -> None:
        """Take back one message, now or as soon as it is unlocked: no other process can receive it from here on."""
        state = self._take_back(slot)
        if state is None:
            self._index.revoke(slot)
            self._unwanted.add(slot)
        self.counts.replaced += state == State.READY

    def _take_back(self, slot: int) -> int | None:
        """Call `_withdraw`, and wait briefly while the message is locked."""
        wait = FIRST_WAIT
        for _ in range(LOOKS):
            state = self._withdraw(slot)
            if state is not None:
                return state
            self._sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        return None

    def _withdraw(self, slot: int) -> int | None:
        """Take back one message unless a receiver holds it, or has received it.

        Returns:
            READY: it was taken back; LEASED: a receiver holds it; another state: it was received, or damaged; None:
            it is locked by a process that may take it, and nothing has changed.
        """
        state = self._index.withdraw(slot)
        if state is None:
            return None
        if state == State.LEASED:
            self._unwanted.add(slot)  # if its receiver dies, it must not be received again
            return state
        sent = self.sent[slot]
        if state == State.CONSUMED and slot not in self._held_since:
            self._saw_got(sent, self._clock())
        self._forget(sent, freed=True)
        self.counts.consumed += state == State.CONSUMED
        return state

    def _take_from_the_dead(self, sent: Sent, holder: int) -> None:
        if not self._index.give_back(sent.slot, holder):
            return
        self._held_since.pop(sent.slot, None)
        self._mark(sent, got=False)
        if sent.slot in self._unwanted:
            self.counts.discarded += self._withdraw(sent.slot) == State.READY
        else:
            self.counts.given_back += 1
            logger.warning(
                "the receiver of message %r of edge %s died; it can be received again", sent.key[:80], sent.edge
            )

    def _mark(self, sent: Sent, got: bool) -> None:
        """Record whether a message in flight waits."""
        if self._got[sent.slot] != got:
            self._got[sent.slot] = got
            self.counts.waiting[sent.edge] += -1 if got else 1
            self.counts.waiting_bytes[sent.edge] += -sent.nbytes if got else sent.nbytes
            self.progress += got

    def _forget(self, sent: Sent, freed: bool = False) -> None:
        slot, key, name = sent.slot, sent.key, sent.name
        if not freed:
            self._index.free(slot)
        self._free[slot // at.BUCKET].append(slot)
        self.storage.free(sent.pool, sent.offset)
        self._mark(sent, got=True)
        self._got[slot] = 0
        self._held_since.pop(slot, None)
        self._unwanted.discard(slot)
        self.progress += 1
        del self.sent[slot]
        if self._by_name.get(name) == slot:
            del self._by_name[name]
        slots = self._by_key[key]
        slots.discard(slot)
        if not slots:
            del self._by_key[key]
        if sent.done is not None:
            try:
                sent.done()
            except Exception:
                logger.exception("releasing the resources of message %r of edge %s failed", sent.key[:80], sent.edge)
