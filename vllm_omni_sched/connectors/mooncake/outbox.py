"""The sending side: the messages of one process in the store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import RendezvousError, TransportClosedError
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.mooncake.buffers import BufferPool, PooledBuffer
from vllm_omni_sched.connectors.mooncake.calls import HangingError
from vllm_omni_sched.connectors.mooncake.ledger import Ledger, Sent
from vllm_omni_sched.connectors.mooncake.options import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.store import (
    MISSING,
    NO_ROOM,
    OK,
    RPC,
    MasterGoneError,
    Names,
    Store,
    link_key,
    make_link,
    own_key,
)
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

BATCH = 512  # keys in one call


class Outbox:
    """Sender of the messages of one process. The lock of its records is never held during a call of the store.

    Attributes:
        unasked_bytes: bytes put since the master was last asked which messages are gone.
        life: number of the beacon, 0 before the first: as long as the beacon exists, a message that was put in that
            life and is missing was received.
    """

    def __init__(self, store: Store, buffers: BufferPool, options: MooncakeOptions, clock: Clock) -> None:
        self._store, self._buffers, self._options, self._clock = store, buffers, options, clock
        self._names = Names(options.namespace)
        self._ledger = Ledger(clock)
        self._config, self._leaving = store.config(), store.config(replicas=2, pinned=False)
        self._lighting = threading.Lock()
        self._lives = itertools.count(1)
        self.life = 0
        ledger = self._ledger
        self.sent, self.counts, self.facts, self.traffic = ledger.sent, ledger.counts, ledger.facts, ledger.traffic
        self.unasked_bytes = 0

    @property
    def progress(self) -> int:
        """Return a number that grows with every message that was received or removed: there may be room again."""
        counts = self.counts
        return counts.consumed + counts.replaced + counts.discarded + counts.expired + counts.lost

    def put(self, message: Message) -> int | None:
        """Write a message and show it to receivers; return None if there is no room for it now.

        Raises:
            RendezvousError: the store does not answer.
        """
        if not self.life:
            with self._lighting:
                if not self.life:
                    self._light()
        with self._ledger.alone(message.name):
            held_bytes = self._put(message)
        self.unasked_bytes += held_bytes or 0
        return held_bytes

    def discard(self, key: str) -> int:
        """Take back the messages under ``key`` that were not received, on all edges; return how many."""
        return sum(self.withdraw(name) for name in self._ledger.names_of(key))

    def withdraw(self, name: bytes) -> bool:
        """Take back the message of that name; return False if it was received."""
        with self._ledger.alone(name):
            sent = self._ledger.by_name.get(name)
            found = sent is not None and self._withdraw(sent)
        self.counts.discarded += found
        return found

    def reap(self, limit: int | None = None) -> int:
        """Ask the master about ``limit`` messages, and free the room of those that are gone; return how many.

        Raises:
            RendezvousError: the store does not answer.
        """
        some = self._ledger.oldest_looks(limit)
        done = self.unasked_bytes = 0
        for at in range(0, len(some), BATCH):
            asked = some[at : at + BATCH]
            life, lives = self.life, {sent.life for sent in asked}
            *there, lit = self._store.exist([*(sent.stored for sent in asked), self._beacon(life)])
            if not lit or lives != {life}:
                return done + self._lose()
            gone = [sent for sent, is_there in zip(asked, there, strict=True) if not is_there]
            for sent in gone:
                done += self._ledger.consumed(sent)
            self._unlink(gone)
            old = [sent for sent, is_there in zip(asked, there, strict=True) if is_there and self._is_old(sent)]
            done += sum(self._expire(sent) for sent in old)
        return done

    def close(self, seconds: float) -> None:
        """Remove finished messages, and hand the others over to segments of other processes: ours ends with us."""
        until = self._clock() + seconds
        try:
            if self._store.sick:
                raise MasterGoneError(self._store.sick)
            self.reap()
            for sent in self._ledger.waiting():
                if self._clock() >= until:
                    break
                with self._ledger.alone(sent.name):
                    self._hand_over(sent)
            if self.life:
                self._store.remove([self._beacon(self.life)])
        except RendezvousError as error:
            logger.warning(
                "messages in flight could not be handed over to other processes' segments at close: %s", error
            )
        left = self._ledger.waiting()
        self.counts.lost += len(left)
        if left:
            logger.error(
                "%d messages that were not received are lost with this process's segment (the first: %r of %s): no "
                "other process lends the store a segment with room for them",
                len(left), left[0].key[:80], left[0].edge,
            )  # fmt: skip

    def _put(self, message: Message) -> int | None:
        name, nbytes = message.name, message.nbytes
        plain, life = self._names.plain(name), self.life
        before = self._ledger.by_name.get(name)
        generation = self._ledger.next_generation()
        stored = plain if self._ledger.is_fresh(name) else own_key(plain, generation)
        room = self._room(nbytes)
        try:
            message.write_to(room.data.data, room.address, generation, self._options.checksum)
        except BaseException:
            self._buffers.give_back(room)
            raise
        sent = Sent(message.edge, message.key, name, plain, stored, generation, nbytes, self._clock(), life)
        if not self._message(sent, room, self._config):
            self._buffers.give_back(room)
            return None
        try:
            if before is not None:
                self._replace(before)
            if sent.linked:
                self._link(sent, self._config)
        except BaseException:  # it was never shown to receivers
            self.remove_quietly([stored])
            raise
        finally:
            self._buffers.give_back(room)
        self._ledger.enter(sent)
        self.counts.put += 1
        self.counts.put_bytes += nbytes
        return nbytes

    def _replace(self, before: Sent) -> None:
        if self._store.remove([before.stored]) == [OK]:
            self.counts.replaced += 1
        else:
            self.counts.consumed += 1
        self._ledger.was_taken_back(before.name)
        self._ledger.forget(before)

    def _withdraw(self, sent: Sent) -> bool:
        """Take back one message; return False if it was received."""
        code = self._store.remove([sent.stored])[0]
        if code == OK:
            self._ledger.was_taken_back(sent.name)
        elif code != MISSING:
            return False
        if not self._ledger.forget(sent):
            return False
        if sent.linked:
            self._store.remove([link_key(sent.plain)])
        self.counts.consumed += code != OK
        return code == OK

    def _expire(self, sent: Sent) -> bool:
        with self._ledger.alone(sent.name):
            if not self._ledger.holds(sent) or not self._withdraw(sent):
                return False
        self.counts.expired += 1
        logger.warning("message %r of edge %s expired, because it was not received in time", sent.key[:80], sent.edge)
        return True

    def _is_old(self, sent: Sent) -> bool:
        return self._clock() - sent.put_at > self._options.ttl_seconds

    def _unlink(self, gone: list[Sent]) -> None:
        """Remove links to messages that are gone."""
        for sent in gone:
            if sent.linked:
                with self._ledger.alone(sent.name):
                    if sent.name not in self._ledger.by_name:
                        self._store.remove([link_key(sent.plain)])

    def _lose(self) -> int:
        """Forget messages of an earlier life: the master has restarted without its data, or considered us dead.

        Those that it still knows stay in flight; return how many do not.
        """
        with self._lighting:
            if not self._store.exist([self._beacon(self.life)])[0]:
                self._light()
            life, lost = self.life, 0
            before = [sent for sent in self._ledger.waiting() if sent.life != life]
            for at in range(0, len(before), BATCH):
                asked = before[at : at + BATCH]
                there = self._store.exist([sent.stored for sent in asked])
                for sent, is_there in zip(asked, there, strict=True):
                    if is_there:
                        sent.life = life
                    else:
                        lost += self._ledger.forget(sent)
        self.counts.lost += lost
        if lost:
            logger.error("%d messages that were not known to be received were lost by the Mooncake master", lost)
        return lost

    def _hand_over(self, sent: Sent) -> None:
        """Copy one message to the segment of another process."""
        if not self._ledger.holds(sent):
            return
        room = self._room(sent.nbytes)
        code = self._store.get_into(sent.stored, room.address, sent.nbytes, lambda _: self._buffers.give_back(room))
        if code != sent.nbytes:
            self._buffers.give_back(room)
            return
        generation = self._ledger.next_generation()
        copy = replace(sent, stored=own_key(sent.plain, generation), generation=generation)
        stored = self._message(copy, room, self._leaving)
        self._buffers.give_back(room)
        if not stored:
            return
        if self._store.replicas(copy.stored) < 2:
            self._store.remove([copy.stored])
            return
        if self._store.remove([sent.stored]) == [OK]:
            try:
                self._link(copy, self._leaving)
            except RendezvousError:
                self.remove_quietly([copy.stored])
                raise
            self.counts.handed_over += 1
        else:
            self._store.remove([copy.stored])
            self.counts.consumed += 1
        self._ledger.forget(sent)

    def _room(self, nbytes: int) -> PooledBuffer:
        """Return room in the region, or otherwise outside it."""
        return self._buffers.take(nbytes) or self._buffers.make(nbytes)

    def _message(self, sent: Sent, room: PooledBuffer, config: Any) -> bool:
        """Put the content of ``room``; return False if the store has no room.

        Raises:
            RendezvousError: the store does not take it; ``room`` is given back.
        """
        try:
            code = self._write(sent.stored, room, sent.nbytes, config, self._remove_later)
        except HangingError:
            self._ledger.was_taken_back(sent.name)
            raise
        if code == OK:
            return True
        if code == NO_ROOM:
            return False
        self._buffers.give_back(room)
        if code == RPC:
            gone = self._store.gone(code)
            raise MasterGoneError(f"message {sent.key[:80]!r} of {sent.edge} was not put: {gone}")
        raise RendezvousError(f"message {sent.key[:80]!r} of {sent.edge} was not put: Mooncake says {code}")

    def _link(self, sent: Sent, config: Any) -> None:
        """Put a link to the key under which a message is stored.

        Raises:
            RendezvousError: the store does not take the link.
        """
        link = make_link(sent.generation)
        room = self._room(len(link))
        room.data[:] = bytearray(link)
        code = self._write(link_key(sent.plain), room, len(link), config)
        self._buffers.give_back(room)
        if code != OK:
            raise RendezvousError(f"message {sent.key[:80]!r} of {sent.edge} was not put: Mooncake says {code}")

    def _beacon(self, life: int) -> str:
        return self._names.beacon(self._ledger.token, life)

    def _light(self) -> None:
        """Put a new beacon.

        Raises:
            MasterGoneError: the store does not take the beacon.
        """
        room, life = self._room(8), next(self._lives)  # each time another: one that comes late says nothing
        room.data[:] = 1
        code = self._write(self._beacon(life), room, 8, self._config, self._remove_later)
        self._buffers.give_back(room)
        if code == RPC:
            raise self._store.gone(code)
        if code != OK:
            raise MasterGoneError(f"the Mooncake store takes nothing from this process (code {code})")
        self.life = life

    def _write(
        self, key: str, room: PooledBuffer, nbytes: int, config: Any, came_late: Callable[[str], None] = lambda _: None
    ) -> int:
        """Put the content of ``room``; after an error, ``room`` is freed as soon as no call reads it any more.

        Args:
            came_late: called with the key when it was put after we had given up.
        """

        def late(code: int | None) -> None:
            self._buffers.give_back(room)
            if code == OK:
                came_late(key)

        try:
            return self._store.put_from(key, room.address, nbytes, config, late)
        except HangingError:
            raise  # `late` gives it back
        except BaseException:
            self._buffers.give_back(room)
            raise

    def _remove_later(self, key: str) -> None:
        """Remove an object on a new thread, for callers on a thread that runs calls."""
        threading.Thread(target=self.remove_quietly, args=([key],), daemon=True).start()

    def remove_quietly(self, keys: list[str]) -> None:
        try:
            self._store.remove(keys)
        except (RendezvousError, TransportClosedError) as error:
            logger.warning("%d objects may stay in the Mooncake store: %s", len(keys), error)
