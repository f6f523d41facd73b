"""The sending side: the messages of one process in the store."""

from __future__ import annotations

import threading
from dataclasses import replace

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.mooncake.buffers import BufferPool, PooledBuffer
from vllm_omni_sched.connectors.mooncake.calls import HangingError
from vllm_omni_sched.connectors.mooncake.ledger import Ledger, Sent
from vllm_omni_sched.connectors.mooncake.names import Names, link_key, own_key
from vllm_omni_sched.connectors.mooncake.options import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.store import MISSING, OK, MasterGoneError, Store
from vllm_omni_sched.connectors.mooncake.writer import Writer
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

BATCH = 512  # keys in one call


class Outbox:
    """Sender of the messages of one process. The lock of its records is never held during a call of the store.

    Attributes:
        unasked_bytes: bytes put since the master was last asked which messages are gone.
    """

    def __init__(self, store: Store, buffers: BufferPool, options: MooncakeOptions, clock: Clock) -> None:
        self._store, self._buffers, self._options, self._clock = store, buffers, options, clock
        self._names = Names(options.namespace)
        self._ledger = Ledger(buffers, clock)
        self._writer = Writer(store, buffers, self._ledger, self._names)
        self._restoring = threading.Lock()
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
        if not self._writer.life:
            with self._restoring:
                if not self._writer.life:
                    self._writer.light()
        if not self._buffers.has(message.nbytes):
            self.reap()
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

    def holds(self, name: bytes) -> bool:
        """Return whether the last message of that name waits; True while that is unknown."""
        sent = self._ledger.by_name.get(name)
        try:
            return sent is not None and (bool(self._store.sick) or self._store.exist([sent.stored]) == [True])
        except RendezvousError:
            return True

    def is_put_again(self, name: bytes, generation: int) -> bool:
        """Return whether the last message of that name is a later one."""
        sent = self._ledger.by_name.get(name)
        return sent is not None and sent.generation != generation

    def reap(self, limit: int | None = None) -> int:
        """Ask the master about ``limit`` messages, and free the room of those that are gone; return how many.

        Raises:
            RendezvousError: the store does not answer.
        """
        some = self._ledger.oldest_looks(limit)
        done = self.unasked_bytes = 0
        for at in range(0, len(some), BATCH):
            asked = some[at : at + BATCH]
            life, lives = self._writer.life, {sent.life for sent in asked}
            *there, lit = self._store.exist([*(sent.stored for sent in asked), self._writer.beacon(life)])
            if not lit or lives != {life}:
                self._restore()
                return done
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
            if self._writer.life:
                self._store.remove([self._writer.beacon(self._writer.life)])
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
        plain, life = self._names.plain(name), self._writer.life
        before = self._ledger.by_name.get(name)
        generation = self._ledger.next_generation()
        stored = plain if self._ledger.is_fresh(name) else own_key(plain, generation)
        room = self._writer.room(nbytes)
        try:
            message.write_to(room.data.data, room.address, generation, self._options.checksum)
        except BaseException:
            self._buffers.give_back(room)
            raise
        sent = Sent(message.edge, message.key, name, plain, stored, generation, nbytes, room, self._clock(), life)
        if not self._writer.message(sent, room, self._writer.config):
            self._buffers.give_back(room)
            return None
        try:
            if before is not None:
                self._replace(before)
            if sent.linked:
                self._writer.link(sent, self._writer.config)
        except BaseException:  # it was never shown to receivers
            self._buffers.give_back(room)
            self._writer.remove_quietly([stored])
            raise
        if not self._options.retain or room.start is None:
            sent.room = None
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

    def _restore(self) -> None:
        """Put the copies of messages again, because the master has restarted without its data, or considered us dead.

        What was put since the beacon of this life was lit, by others or by a `_restore` that stopped half way, is left
        alone: if it is missing, it was got.
        """
        with self._restoring:
            if not self._store.exist([self._writer.beacon(self._writer.life)])[0]:
                self._writer.light()
            life = self._writer.life
            before = [sent for sent in self._ledger.waiting() if sent.life != life]
            for at in range(0, len(before), BATCH):
                asked = before[at : at + BATCH]
                there = self._store.exist([sent.stored for sent in asked])
                for sent, is_there in zip(asked, there, strict=True):
                    if is_there:
                        sent.life = life
                        continue
                    with self._ledger.alone(sent.name):
                        self._put_again(sent, life)

    def _put_again(self, sent: Sent, life: int) -> None:
        if not self._ledger.holds(sent):
            return
        config = self._writer.config
        if sent.linked and sent.room is not None:  # first, so that the message has its link even if a later step fails
            self._writer.link(sent, config)
        room = self._ledger.begins_to_read(sent)
        if room is None:
            if not self._ledger.forget(sent):  # it was received meanwhile
                return
            self.counts.lost += 1
            logger.error("message %r of %s was lost by the Mooncake master: no copy was left", sent.key[:80], sent.edge)
            return
        try:
            code = self._store.put_from(
                sent.stored, room.address, sent.nbytes, config, lambda code: self._on_late_answer(sent, room, code)
            )
        except HangingError:
            raise  # `_on_late_answer` is called when no call reads the copy any more
        except BaseException:
            self._ledger.has_read(sent, room)
            raise
        self._ledger.has_read(sent, room)
        if code != OK:
            raise RendezvousError(f"the store does not yet accept a message that its master has lost (code {code})")
        sent.life = life
        self.counts.restored += 1

    def _on_late_answer(self, sent: Sent, room: PooledBuffer, code: int | None) -> None:
        """Handle a message that was put again by a call that was given up; remove it if it is not ours any more."""
        self._ledger.has_read(sent, room)
        if code == OK and sent.stored not in self._ledger.sent:
            self._writer.remove_later(sent.stored)

    def _hand_over(self, sent: Sent) -> None:
        """Copy one message to the segment of another process."""
        if not self._ledger.holds(sent):
            return
        room = self._ledger.take_copy(sent)
        if room is None:
            made = room = self._writer.room(sent.nbytes)
            code = self._store.get_into(sent.stored, room.address, sent.nbytes, lambda _: self._buffers.give_back(made))
            if code != sent.nbytes:
                self._buffers.give_back(room)
                return
        generation = self._ledger.next_generation()
        copy = replace(sent, stored=own_key(sent.plain, generation), generation=generation, room=None)
        stored = self._writer.message(copy, room, self._writer.leaving)
        self._buffers.give_back(room)
        if not stored:
            return
        if self._store.replicas(copy.stored) < 2:
            self._store.remove([copy.stored])
            return
        if self._store.remove([sent.stored]) == [OK]:
            try:
                self._writer.link(copy, self._writer.leaving)
            except RendezvousError:
                self._writer.remove_quietly([copy.stored])
                raise
            self.counts.handed_over += 1
        else:
            self._store.remove([copy.stored])
            self.counts.consumed += 1
        self._ledger.forget(sent)
