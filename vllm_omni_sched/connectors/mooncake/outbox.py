"""The sending side: one process's messages in the store."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.base import Edge, InFlight, Traffic
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.mooncake.calls import HangingError
from vllm_omni_sched.connectors.mooncake.names import Names, link_key, make_link, own_key
from vllm_omni_sched.connectors.mooncake.options import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.rooms import Room, Rooms
from vllm_omni_sched.connectors.mooncake.store import MISSING, NO_ROOM, OK, RPC, MasterGoneError, Store
from vllm_omni_sched.errors import RendezvousError

logger = logging.getLogger(__name__)

READ_SECONDS = 60.0
"""So long somebody may go on to read what was taken back."""
BATCH = 512  # keys in one call


@dataclass(eq=False)
class Sent:
    """A message on its way; ``room`` holds our copy of it, if there still is one."""

    edge: Edge
    key: str
    name: bytes
    plain: str
    stored: str
    generation: int
    nbytes: int
    room: Room | None
    put_at: float
    stuck: bool = False  # a call that hangs may still read the copy

    @property
    def linked(self) -> bool:
        return self.stored != self.plain


@dataclass
class OutboxCounts:
    """What has become of messages."""

    put: int = 0
    put_bytes: int = 0
    consumed: int = 0
    replaced: int = 0
    discarded: int = 0
    expired: int = 0
    refused: int = 0
    restored: int = 0  # put again after the master had lost them
    lost: int = 0  # by the master, when we had no copy
    handed_over: int = 0  # to another segment, at the end
    waiting: Counter[Edge] = field(default_factory=Counter)  # messages in flight
    waiting_bytes: Counter[Edge] = field(default_factory=Counter)


class Outbox:
    """Messages of one process.

    The lock is about the books, never held in a call of the store. While a message of a name is being put or taken
    back, others of that name wait.
    """

    def __init__(self, store: Store, rooms: Rooms, options: MooncakeOptions, clock: Clock) -> None:
        self._store, self._rooms, self._options, self._clock = store, rooms, options, clock
        self._names = Names(options.namespace)
        self._token = secrets.randbits(32)
        self._count = 0
        self._beacon = self._names.beacon(self._token)
        self._lit = False
        self._config, self._leaving = store.config(), store.config(replicas=2, pinned=False)
        self._lock = threading.Condition()
        self._restoring = threading.Lock()
        self._busy: set[bytes] = set()
        self._taken_back: OrderedDict[bytes, float] = OrderedDict()
        self.sent: OrderedDict[str, Sent] = OrderedDict()  # by stored key; who was looked at longest ago comes first
        self._by_name: dict[bytes, Sent] = {}
        self._by_key: dict[str, set[bytes]] = {}
        self.counts = OutboxCounts()
        self._last: dict[Edge, Traffic] = {}  # what was got last
        self.unasked_bytes = 0  # put since the master was asked what is gone

    def put(self, message: Message) -> int | None:
        """Write a message and show it to receivers; None when there is no room for it now.

        Raises:
            RendezvousError: the store does not answer.
        """
        if not self._lit:
            self._light()
        if not self._rooms.has(message.nbytes):
            self.reap()
        with self._alone(message.name):
            held_bytes = self._put(message)
        self.unasked_bytes += held_bytes or 0
        return held_bytes

    def discard(self, key: str) -> int:
        """Take back what nobody has got under ``key``, on all edges; how many messages."""
        with self._lock:
            names = list(self._by_key.get(key, ()))
        found = 0
        for name in names:
            with self._alone(name):
                sent = self._by_name.get(name)
                found += sent is not None and self._withdraw(sent)
        self.counts.discarded += found
        return found

    def holds(self, name: bytes) -> bool:
        """Whether the last message of that name waits; True while nobody can say."""
        with self._lock:
            sent = self._by_name.get(name)
        try:
            return sent is not None and (bool(self._store.sick) or self._store.exist([sent.stored]) == [True])
        except RendezvousError:
            return True

    def reap(self, limit: int | None = None) -> int:
        """Ask the master about ``limit`` messages, and take back the room of those that are gone; how many.

        Raises:
            RendezvousError: the store does not answer.
        """
        with self._lock:
            some = list(self.sent.values())[:limit]
            for sent in some:
                self.sent.move_to_end(sent.stored)
        done = self.unasked_bytes = 0
        for at in range(0, len(some), BATCH):
            asked = some[at : at + BATCH]
            *there, lit = self._store.exist([*(sent.stored for sent in asked), self._beacon])
            if not lit:
                self._restore()
                return done
            gone = [sent for sent, is_there in zip(asked, there, strict=True) if not is_there]
            for sent in gone:
                done += self._forget(sent)
                self.counts.consumed += 1
                self._last.setdefault(sent.edge, Traffic()).got(sent.put_at, self._clock())
            self._unlink(gone)
            old = [sent for sent, is_there in zip(asked, there, strict=True) if is_there and self._is_old(sent)]
            done += sum(self._expire(sent) for sent in old)
        return done

    def release(self, nbytes: int) -> Room | None:
        """Room for a message: copies of others go for it, oldest first, and are not there if the master loses them."""
        if nbytes > self._rooms.nbytes:
            return None
        while (room := self._rooms.take(nbytes)) is None:
            with self._lock:
                copied = next(
                    (sent for sent in self._by_name.values() if sent.room and sent.name not in self._busy), None
                )
                if copied is None or copied.room is None:
                    return None
                self._rooms.give_back(copied.room)
                copied.room = None
        return room

    def facts(self) -> dict[str, Any]:
        """Numbers for `Health.facts`."""
        counts = {name: value for name, value in vars(self.counts).items() if isinstance(value, int)}
        with self._lock:
            waiting = list(self.sent.values())
        copies = sum(sent.room is not None for sent in waiting)
        return {
            **counts,
            "in_flight": len(waiting),
            "in_flight_bytes": sum(s.nbytes for s in waiting),
            "copies": copies,
        }

    def traffic(self) -> dict[Edge, Traffic]:
        """What is on its way, by edge, as far as is known."""
        with self._lock:
            found = {edge: replace(last, waiting=[]) for edge, last in self._last.items()}
            for sent in self.sent.values():
                found.setdefault(sent.edge, Traffic()).waiting.append(InFlight(sent.put_at, sent.nbytes))
        return found

    def close(self, seconds: float) -> None:
        """Take back what is done with, and leave the rest to the segments of others: ours goes with us."""
        until = self._clock() + seconds
        try:
            if self._store.sick:
                raise MasterGoneError(self._store.sick)
            self.reap()
            for sent in list(self.sent.values()):
                if self._clock() >= until:
                    break
                with self._alone(sent.name):
                    self._hand_over(sent)
            if self._lit:
                self._store.remove([self._beacon])
        except RendezvousError as error:
            logger.warning("messages could not be left to others: %s", error)
        with self._lock:
            left = list(self.sent.values())
        self.counts.lost += len(left)
        if left:
            logger.error(
                "%d messages that nobody got are lost with this process's segment (the first: %r of %s): no other "
                "process lends the store a segment with room for them",
                len(left), left[0].key[:80], left[0].edge,
            )  # fmt: skip

    def _put(self, message: Message) -> int | None:
        name, nbytes = message.name, message.nbytes
        plain = self._names.plain(name)
        before = self._by_name.get(name)
        generation = self._next_generation()
        with self._lock:
            self._forget_taken_back()
            fresh = before is None and name not in self._taken_back
        room = self.release(nbytes) or self._rooms.make(nbytes)
        try:
            message.write_to(room.data.data, room.address, generation)
        except BaseException:
            self._rooms.give_back(room)
            raise
        sent = Sent(
            message.edge, message.key, name, plain, plain if fresh else own_key(plain, generation), generation, nbytes,
            room, self._clock(),
        )  # fmt: skip
        if not self._store_it(sent, room, self._config):
            self._rooms.give_back(room)
            return None
        if before is not None:
            self._replace(before)
        if sent.linked:
            self._link(sent, self._config)
        if not self._options.retain or room.start is None:
            sent.room = None
            self._rooms.give_back(room)
        self._enter(sent)
        self.counts.put += 1
        self.counts.put_bytes += nbytes
        return nbytes

    def _next_generation(self) -> int:
        with self._lock:
            self._count += 1
            return self._token << 32 | self._count & 0xFFFFFFFF

    def _store_it(self, sent: Sent, room: Room, config: Any) -> bool:
        """Put what lies in ``room``; False when the store has no room."""

        def late(code: int | None) -> None:
            """The call that we gave up on has ended: take back what it put, and the room."""
            self._rooms.give_back(room)
            if code == OK:
                threading.Thread(target=self._remove_quietly, args=([sent.stored],), daemon=True).start()

        try:
            code = self._store.put_from(sent.stored, room.address, sent.nbytes, config, late)
        except HangingError:
            with self._lock:
                self._taken_back[sent.name] = self._clock()
            raise
        if code == OK:
            return True
        if code == NO_ROOM:
            return False
        self._rooms.give_back(room)
        if code == RPC:
            self._store.sick = "the Mooncake master does not answer"
            raise MasterGoneError(f"message {sent.key[:80]!r} of {sent.edge} was not put: {self._store.sick}")
        raise RendezvousError(f"message {sent.key[:80]!r} of {sent.edge} was not put: Mooncake says {code}")

    def _link(self, sent: Sent, config: Any) -> None:
        """Say which key a message lies under.

        Raises:
            RendezvousError: that could not be said; the message is taken back.
        """
        link = make_link(sent.generation)
        room = self.release(len(link)) or self._rooms.make(len(link))
        room.data[:] = bytearray(link)
        try:
            code = self._store.put_from(
                link_key(sent.plain), room.address, len(link), config, lambda _: self._rooms.give_back(room)
            )
        except HangingError:
            self._remove_quietly([sent.stored])
            raise
        self._rooms.give_back(room)
        if code != OK:
            self._remove_quietly([sent.stored])
            raise RendezvousError(f"message {sent.key[:80]!r} of {sent.edge} was not put: Mooncake says {code}")

    def _replace(self, before: Sent) -> None:
        if self._store.remove([before.stored]) == [OK]:
            self.counts.replaced += 1
        else:
            self.counts.consumed += 1
        self._taken_back[before.name] = self._clock()
        self._forget(before)

    def _withdraw(self, sent: Sent) -> bool:
        """Take back one message; False when it was got."""
        code = self._store.remove([sent.stored])[0]
        if code == OK:
            with self._lock:
                self._taken_back[sent.name] = self._clock()
        elif code != MISSING:
            return False
        if not self._forget(sent):
            return False
        if sent.linked:
            self._store.remove([link_key(sent.plain)])
        self.counts.consumed += code != OK
        return code == OK

    def _expire(self, sent: Sent) -> bool:
        with self._alone(sent.name):
            if self.sent.get(sent.stored) is not sent or not self._withdraw(sent):
                return False
        self.counts.expired += 1
        logger.warning("message %r of %s expired: nobody got it", sent.key[:80], sent.edge)
        return True

    def _restore(self) -> None:
        """The master has come back without what it knew, or had taken us for dead: put again what we have copies of."""
        with self._restoring:
            with self._lock:
                waiting = list(self.sent.values())
            for at in range(0, len(waiting), BATCH):
                asked = waiting[at : at + BATCH]
                there = self._store.exist([sent.stored for sent in asked])
                for sent, is_there in zip(asked, there, strict=True):
                    if not is_there:
                        with self._alone(sent.name):
                            self._put_again(sent)
            self._light()

    def _put_again(self, sent: Sent) -> None:
        if self.sent.get(sent.stored) is not sent:
            return
        if sent.room is None:
            self._forget(sent)
            self.counts.lost += 1
            logger.error("message %r of %s was lost by the Mooncake master: no copy was left", sent.key[:80], sent.edge)
            return
        try:
            code = self._store.put_from(sent.stored, sent.room.address, sent.nbytes, self._config, lambda _: None)
        except HangingError:
            sent.stuck = True
            raise
        if code != OK:
            raise RendezvousError(f"the store does not take yet what its master has lost (code {code})")
        if sent.linked:
            self._link(sent, self._config)
        self.counts.restored += 1

    def _hand_over(self, sent: Sent) -> None:
        """Put one message in the segment of somebody else, too."""
        if self.sent.get(sent.stored) is not sent:
            return
        room, sent.room = sent.room, None
        if room is None:
            made = room = self.release(sent.nbytes) or self._rooms.make(sent.nbytes)
            code = self._store.get_into(sent.stored, room.address, sent.nbytes, lambda _: self._rooms.give_back(made))
            if code != sent.nbytes:
                self._rooms.give_back(room)
                return
        generation = self._next_generation()
        copy = replace(sent, stored=own_key(sent.plain, generation), generation=generation, room=None)
        stored = self._store_it(copy, room, self._leaving)
        self._rooms.give_back(room)
        if not stored:
            return
        if self._store.replicas(copy.stored) < 2:
            self._store.remove([copy.stored])
            return
        if self._store.remove([sent.stored]) == [OK]:
            self._link(copy, self._leaving)
            self.counts.handed_over += 1
        else:
            self._store.remove([copy.stored])
            self.counts.consumed += 1
        self._forget(sent)

    def _light(self) -> None:
        """Put the beacon: as long as it is there, what is missing was got."""
        room = self.release(8) or self._rooms.make(8)
        room.data[:] = 1
        code = self._store.put_from(
            self._beacon, room.address, 8, self._config, lambda _: self._rooms.give_back(room)
        )  # a hanging call raises, and keeps the room
        self._rooms.give_back(room)
        if code == RPC:
            self._store.sick = "the Mooncake master does not answer"
        if code != OK:
            raise MasterGoneError(f"the Mooncake store takes nothing from this process (code {code})")
        self._lit = True

    @contextmanager
    def _alone(self, name: bytes) -> Iterator[None]:
        """Nobody else puts or takes back messages of that name meanwhile."""
        with self._lock:
            while name in self._busy:
                self._lock.wait()
            self._busy.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(name)
                self._lock.notify_all()

    def _is_old(self, sent: Sent) -> bool:
        return self._clock() - sent.put_at > self._options.ttl_seconds

    def _forget_taken_back(self) -> None:
        now = self._clock()
        while self._taken_back:
            name, since = next(iter(self._taken_back.items()))
            if now - since < READ_SECONDS:
                return
            del self._taken_back[name]

    def _enter(self, sent: Sent) -> None:
        with self._lock:
            self.sent[sent.stored] = sent
            self._by_name[sent.name] = sent
            self._by_key.setdefault(sent.key, set()).add(sent.name)
            self.counts.waiting[sent.edge] += 1
            self.counts.waiting_bytes[sent.edge] += sent.nbytes

    def _forget(self, sent: Sent) -> bool:
        """Out of the books; False when it was not in there."""
        with self._lock:
            if self.sent.get(sent.stored) is not sent:
                return False
            del self.sent[sent.stored]
            if self._by_name.get(sent.name) is sent:
                del self._by_name[sent.name]
                names = self._by_key[sent.key]
                names.discard(sent.name)
                if not names:
                    del self._by_key[sent.key]
            self.counts.waiting[sent.edge] -= 1
            self.counts.waiting_bytes[sent.edge] -= sent.nbytes
            if sent.room is not None and not sent.stuck:
                self._rooms.give_back(sent.room)
            sent.room = None
            return True

    def _unlink(self, gone: list[Sent]) -> None:
        """Remove links that lead nowhere."""
        for sent in gone:
            if sent.linked:
                with self._alone(sent.name):
                    if sent.name not in self._by_name:
                        self._store.remove([link_key(sent.plain)])

    def _remove_quietly(self, keys: list[str]) -> None:
        try:
            self._store.remove(keys)
        except RendezvousError as error:
            logger.warning("%d objects may stay in the Mooncake store: %s", len(keys), error)
