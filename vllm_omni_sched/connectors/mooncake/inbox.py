"""The receiving side: messages are searched for, read, and then removed from the store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import CorruptMessageError, RendezvousError
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import Arrival
from vllm_omni_sched.connectors.mooncake.buffers import BufferPool, PooledBuffer
from vllm_omni_sched.connectors.mooncake.calls import HangingError
from vllm_omni_sched.connectors.mooncake.options import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.store import (
    LEASE_OVER,
    LINK_BYTES,
    MISSING,
    NOT_READY,
    OK,
    RPC,
    TOO_SMALL,
    Names,
    Store,
    link_key,
    own_key,
    read_link,
)
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

FIRST_WAIT = 2e-4  # seconds between two looks for a message, doubled each time
UNREACHABLE_WAIT = 0.25  # until the next try when the holder of a message does not answer
FORGOTTEN_AFTER = 10.0  # seconds without a `get` of that name
REMEMBERED = 1 << 16  # generations


@dataclass
class InboxCounts:
    """Counts of received messages, and of requests to the master."""

    got: int = 0
    got_bytes: int = 0
    copied_bytes: int = 0
    corrupt: int = 0
    looks: int = 0
    repeated: int = 0  # received before, and put again by a sender that did not know that
    unreachable: int = 0  # attempts to read a message whose holder did not answer
    vanished: int = 0  # seen, but its holder died before it could be read


@dataclass
class _Wanted:
    """Requested name, for which `get` is called."""

    name: bytes
    edge: Edge
    plain: str
    wait: float = FIRST_WAIT
    next_at: float = 0.0
    asked_at: float = 0.0
    keys: list[str] = field(default_factory=list)  # where it was seen, newest first
    reading: bool = False
    hanging: bool = False  # an abandoned call still writes to our memory: no other read is started meanwhile
    taken: tuple[str, PooledBuffer, int] | None = None  # by an abandoned call: key, buffer, result of `claim`
    unreachable: bool = False


class Inbox:
    """Receiver of the messages of one process.

    1. Names that are requested repeatedly are looked up together, at growing intervals up to ``poll_seconds``.
    2. A receiver takes a message by removing it; the one whose removal succeeds has it.
    3. A message whose holder does not answer stays where it is, and is tried again.
    4. If the master dies during the removal, the message is delivered, and a repeated one is refused.
    """

    def __init__(self, store: Store, buffers: BufferPool, options: MooncakeOptions, clock: Clock) -> None:
        self._store, self._buffers, self._options, self._clock = store, buffers, options, clock
        self._names = Names(options.namespace)
        self._lock = threading.Lock()
        self._wanted: dict[bytes, _Wanted] = {}
        self._swept_at = clock()
        self._got: OrderedDict[int, None] = OrderedDict()
        self._to_remove: list[str] = []
        self._largest: dict[Edge, int] = {}
        self.counts = InboxCounts()

    def get(self, edge: Edge, key: str) -> Arrival | None:
        """Return the message of that name, or None; see `Transport.get`.

        Raises:
            CorruptMessageError: the message is damaged; it has been removed.
            RendezvousError: the store does not answer.
        """
        name = name_of(edge, key)
        with self._lock:
            wanted = self._wanted.get(name)
            if first := wanted is None:
                wanted = self._wanted[name] = _Wanted(name, edge, self._names.plain(name))
            now = wanted.asked_at = self._clock()
            if wanted.reading or wanted.hanging or now < wanted.next_at:
                return None
            wanted.reading = True
            due = [] if first or wanted.keys or wanted.taken else [wanted, *self._due(now)]
            for one in due:
                one.reading = True
        arrival = None
        try:
            if due:
                self._look(due)
            if wanted.taken is not None:
                arrival = self._open(wanted, *wanted.taken)
            elif first or wanted.keys:
                arrival = self._read(wanted, first)
        except HangingError as error:
            self._holder_is_silent(wanted, str(error))
        finally:
            with self._lock:
                for one in (wanted, *due):
                    one.reading = False
                if arrival is not None:
                    self._wanted.pop(name, None)
        return arrival

    def tidy(self) -> None:
        """Remove messages whose removal failed before, and drop names that are not requested any more.

        Raises:
            RendezvousError: the store does not answer.
        """
        with self._lock:
            keys, self._to_remove = self._to_remove, []
            now = self._clock()
            for name, wanted in list(self._wanted.items()):
                if now - wanted.asked_at > FORGOTTEN_AFTER and not (wanted.reading or wanted.hanging or wanted.taken):
                    del self._wanted[name]
        try:
            self._store.remove(keys)
        except RendezvousError:
            with self._lock:
                self._to_remove += keys
            raise

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        return {**vars(self.counts), "wanted": len(self._wanted)}

    def _due(self, now: float) -> list[_Wanted]:
        """Return other names that can be looked up in the same call, with `_lock` held."""
        return [
            one
            for one in self._wanted.values()
            if not (one.reading or one.hanging or one.keys or one.taken)
            and now >= one.next_at - one.wait / 2
            and now - one.asked_at < 1.0
        ]

    def _look(self, due: list[_Wanted]) -> None:
        keys = [key for one in due for key in (link_key(one.plain), one.plain)]
        self.counts.looks += 1
        there = self._store.exist(keys)
        now = self._clock()
        for place, one in enumerate(due):
            one.keys = [
                key for key, is_there in zip(keys[2 * place :][:2], there[2 * place :][:2], strict=True) if is_there
            ]
            if not one.keys:
                if one.unreachable:
                    self._has_vanished(one)
                one.next_at = now + one.wait
                one.wait = min(2 * one.wait, self._options.poll_seconds)

    def _read(self, wanted: _Wanted, first: bool) -> Arrival | None:
        """Read a message from where it was seen; ``first``: from its most likely key."""
        keys, wanted.keys = [wanted.plain] if first else wanted.keys, []
        for key in keys:
            if key != wanted.plain:
                generation = self._follow(wanted, key)
                if generation is None:
                    continue
                key = own_key(wanted.plain, generation)
            if (arrival := self._take(wanted, key)) is not None:
                return arrival
        wanted.next_at = max(wanted.next_at, self._clock() + FIRST_WAIT)
        return None

    def _follow(self, wanted: _Wanted, key: str) -> int | None:
        room = self._buffers.take(LINK_BYTES) or self._buffers.make(LINK_BYTES)
        wanted.hanging = True
        code = self._store.get_into(key, room.address, LINK_BYTES, partial(self._on_late_answer, wanted, key, room))
        wanted.hanging = False
        said = room.data.tobytes()
        self._buffers.give_back(room)
        if code in (LINK_BYTES, LEASE_OVER):
            return read_link(said)
        self._cannot_be_read(wanted, code)
        return None

    def _take(self, wanted: _Wanted, key: str) -> Arrival | None:
        """Read and remove a message, into room for the largest message of its edge, or for its own size."""
        largest = self._largest.get(wanted.edge)
        room = self._buffers.take(largest) if largest else None
        while True:
            if room is None:
                nbytes = self._store.size(key)
                if nbytes <= 0:
                    self._cannot_be_read(wanted, nbytes)
                    return None
                if nbytes > self._buffers.nbytes // 4:
                    largest = 0  # of this edge, sizes are asked for
                elif largest != 0:
                    largest = max(largest or 0, nbytes)
                self._largest[wanted.edge] = largest
                room = self._buffers.take(nbytes) or self._buffers.make(nbytes)
            wanted.hanging = True
            read, claimed = self._store.take(
                key, room.address, room.data.nbytes, partial(self._on_late_answer, wanted, key, room)
            )
            wanted.hanging = False
            if read > 0 or read == LEASE_OVER:  # removed after it was read: it was complete until then
                return self._open(wanted, key, room, claimed)
            self._buffers.give_back(room)
            if read != TOO_SMALL:
                self._cannot_be_read(wanted, read)
                return None
            room = None

    def _on_late_answer(self, wanted: _Wanted, key: str, room: PooledBuffer, answer: Any) -> None:
        """Handle the end of a call that was given up: a message it has taken is kept for the next `get`."""
        if isinstance(answer, tuple) and answer[1] in (OK, RPC):
            wanted.taken = (key, room, answer[1])
        else:
            self._buffers.give_back(room)
        wanted.hanging = False

    def _open(self, wanted: _Wanted, key: str, room: PooledBuffer, claimed: int) -> Arrival | None:
        """Return the message that was read, if this process was the one that removed it."""
        wanted.taken = None
        if claimed not in (OK, RPC):  # another receiver has it, or its sender took it back
            self._buffers.give_back(room)
            return None
        data: Any = room.data
        try:
            arrival = Arrival(data, wanted.name)
        except CorruptMessageError:
            self._buffers.give_back(room)
            self.counts.corrupt += 1
            raise
        with self._lock:
            if claimed == RPC:
                self._to_remove.append(key)
            repeated = arrival.generation in self._got
            self._got[arrival.generation] = None
            if len(self._got) > REMEMBERED:
                self._got.popitem(last=False)
        if repeated:
            self._buffers.give_back(room)
            self.counts.repeated += 1
            return None
        self.counts.got += 1
        self.counts.got_bytes += arrival.nbytes
        if self._options.copy_out:
            arrival = Arrival(bytearray(data[: arrival.nbytes]), wanted.name, copied=True)
            self.counts.copied_bytes += arrival.nbytes
            self._buffers.give_back(room)
        else:
            self._buffers.trim(room, arrival.nbytes)
            self._buffers.lend(room)
        return arrival

    def _cannot_be_read(self, wanted: _Wanted, code: int) -> None:
        if code == RPC:
            raise self._store.gone(code)
        if code not in (MISSING, NOT_READY):
            self._holder_is_silent(wanted, f"code {code}")

    def _holder_is_silent(self, wanted: _Wanted, why: str) -> None:
        wanted.next_at = self._clock() + UNREACHABLE_WAIT
        self.counts.unreachable += 1
        if not wanted.unreachable:
            wanted.unreachable = True
            logger.warning(
                "message on edge %s is in the Mooncake store, but cannot be read (%s); trying again", wanted.edge, why
            )

    def _has_vanished(self, wanted: _Wanted) -> None:
        wanted.unreachable = False
        self.counts.vanished += 1
        logger.error(
            "message on edge %s is lost: it could not be read, and left the Mooncake store with its holder", wanted.edge
        )
