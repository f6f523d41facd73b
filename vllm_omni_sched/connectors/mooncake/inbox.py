"""The receiving side: looks for messages, reads them, and removes what it has read."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.base import Edge, name_of
from vllm_omni_sched.connectors.framing import Arrival
from vllm_omni_sched.connectors.mooncake.calls import HangingError
from vllm_omni_sched.connectors.mooncake.names import LINK_BYTES, Names, link_key, own_key, read_link
from vllm_omni_sched.connectors.mooncake.options import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.rooms import Room, Rooms
from vllm_omni_sched.connectors.mooncake.store import LEASE_OVER, MISSING, NOT_READY, OK, MasterGoneError, Store
from vllm_omni_sched.errors import CorruptMessageError, RendezvousError

logger = logging.getLogger(__name__)

FIRST_WAIT = 2e-4  # seconds between two looks for a message, doubled each time
UNREACHABLE_WAIT = 0.25  # until the next try when the holder of a message does not answer
FORGOTTEN_AFTER = 10.0  # seconds without a `get` of that name
REMEMBERED = 1 << 16  # generations


@dataclass
class InboxCounts:
    """What this process has received, and what it has asked the master for."""

    got: int = 0
    got_bytes: int = 0
    copied_bytes: int = 0
    corrupt: int = 0
    looks: int = 0
    repeated: int = 0  # got before, and put again by a sender that could not know
    unreachable: int = 0  # tries to read a message whose holder did not answer
    vanished: int = 0  # seen, but its holder died before it could be read


@dataclass
class _Wanted:
    """A name that somebody asks for."""

    plain: str
    wait: float = FIRST_WAIT
    next_at: float = 0.0
    asked_at: float = 0.0
    keys: list[str] = field(default_factory=list)  # where it was seen, newest first
    reading: bool = False
    hanging: bool = False  # a call that was given up still writes to memory of ours: nobody else tries meanwhile
    unreachable: bool = False


class Inbox:
    """Messages for one process.

    1. Names that are asked for again and again are looked up together, less and less often up to ``poll_seconds``.
    2. A message is taken by removing it: who removes it has it.
    3. One whose holder does not answer stays where it is, and is tried again.
    4. When the master dies at the moment of removing, the message is delivered, and what is put again is refused.
    """

    def __init__(self, store: Store, rooms: Rooms, options: MooncakeOptions, clock: Clock) -> None:
        self._store, self._rooms, self._options, self._clock = store, rooms, options, clock
        self._names = Names(options.namespace)
        self._lock = threading.Lock()
        self._wanted: dict[bytes, _Wanted] = {}
        self._swept_at = clock()
        self._got: OrderedDict[int, None] = OrderedDict()
        self._to_remove: list[str] = []
        self.counts = InboxCounts()

    def get(self, edge: Edge, key: str) -> Arrival | None:
        """The message of that name, or None; see `Path.get`.

        Raises:
            CorruptMessageError: what lay there is damaged; it is gone now.
            RendezvousError: the store does not answer.
        """
        name = name_of(edge, key)
        with self._lock:
            wanted = self._wanted.get(name)
            if wanted is None:
                wanted = self._wanted[name] = _Wanted(self._names.plain(name))
            now = wanted.asked_at = self._clock()
            if wanted.reading or wanted.hanging or now < wanted.next_at:
                return None
            if not wanted.keys:
                wanted.reading = True
                due = [wanted, *self._due(now)]
                for one in due:
                    one.reading = True
            else:
                wanted.reading, due = True, []
        try:
            if due:
                self._look(due)
            arrival = self._read(wanted, name) if wanted.keys else None
        except HangingError as error:
            self._holder_is_silent(wanted, str(error))
            return None
        finally:
            with self._lock:
                for one in (wanted, *due):
                    one.reading = False
        if arrival is not None:
            with self._lock:
                self._wanted.pop(name, None)
        return arrival

    def tidy(self) -> None:
        """Remove what could not be removed when it was got, and forget names that nobody asks for any more.

        Raises:
            RendezvousError: the store does not answer.
        """
        with self._lock:
            keys, self._to_remove = self._to_remove, []
            now = self._clock()
            for name, wanted in list(self._wanted.items()):
                if now - wanted.asked_at > FORGOTTEN_AFTER and not wanted.reading:
                    del self._wanted[name]
        try:
            self._store.remove(keys)
        except RendezvousError:
            with self._lock:
                self._to_remove += keys
            raise

    def facts(self) -> dict[str, Any]:
        """Numbers for `Health.facts`."""
        return {**vars(self.counts), "wanted": len(self._wanted)}

    def _due(self, now: float) -> list[_Wanted]:
        """Others that can be looked up in the same call, `_lock` held."""
        return [
            one
            for one in self._wanted.values()
            if not (one.reading or one.hanging or one.keys)
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

    def _read(self, wanted: _Wanted, name: bytes) -> Arrival | None:
        keys, wanted.keys = wanted.keys, []
        for key in keys:
            if key != wanted.plain:
                generation = self._follow(wanted, key)
                if generation is None:
                    continue
                key = own_key(wanted.plain, generation)
            nbytes = self._store.size(key)
            if nbytes <= 0:
                if nbytes not in (MISSING, NOT_READY):
                    self._holder_is_silent(wanted, f"code {nbytes}")
                continue
            room = self._fetch(wanted, key, nbytes)
            if room is not None and (arrival := self._claim(wanted, key, room, name)) is not None:
                return arrival
        wanted.next_at = max(wanted.next_at, self._clock() + FIRST_WAIT)
        return None

    def _follow(self, wanted: _Wanted, key: str) -> int | None:
        room = self._fetch(wanted, key, LINK_BYTES)
        if room is None:
            return None
        said = room.data.tobytes()
        self._rooms.give_back(room)
        return read_link(said)

    def _fetch(self, wanted: _Wanted, key: str, nbytes: int) -> Room | None:
        """The object in room of ours; None when it cannot be read now."""
        room = self._rooms.take(nbytes) or self._rooms.make(nbytes)

        def late(_: Any) -> None:
            self._rooms.give_back(room)
            wanted.hanging = False

        wanted.hanging = True
        code = self._store.get_into(key, room.address, nbytes, late)
        wanted.hanging = False
        if code in (nbytes, LEASE_OVER):  # who removes it after that, proves that it was there all the time
            return room
        self._rooms.give_back(room)
        if code not in (MISSING, NOT_READY):
            self._holder_is_silent(wanted, f"code {code}")
        return None

    def _claim(self, wanted: _Wanted, key: str, room: Room, name: bytes) -> Arrival | None:
        """The message in ``room``, if it is ours."""
        data: Any = room.data
        problem: CorruptMessageError | None = None
        try:
            arrival = Arrival(data, name)
        except CorruptMessageError as error:
            problem = error
        try:
            taken = self._store.remove([key]) == [OK]
        except MasterGoneError:
            taken = True
            with self._lock:
                self._to_remove.append(key)
        with self._lock:
            repeated = problem is None and arrival.generation in self._got
            self.counts.repeated += repeated
            if not taken or repeated or problem is not None:
                self._rooms.give_back(room)
                if taken and problem is not None:
                    self.counts.corrupt += 1
                    raise problem
                return None
            self._got[arrival.generation] = None
            if len(self._got) > REMEMBERED:
                self._got.popitem(last=False)
            self.counts.got += 1
            self.counts.got_bytes += arrival.nbytes
        if self._options.copy_out:
            arrival = Arrival(bytearray(data), name)
            self.counts.copied_bytes += arrival.nbytes
            self._rooms.give_back(room)
        else:
            self._rooms.lend(room)
        return arrival

    def _holder_is_silent(self, wanted: _Wanted, why: str) -> None:
        wanted.next_at = self._clock() + UNREACHABLE_WAIT
        self.counts.unreachable += 1
        if not wanted.unreachable:
            wanted.unreachable = True
            logger.warning("a message is in the Mooncake store, but cannot be read (%s); it is tried again", why)

    def _has_vanished(self, wanted: _Wanted) -> None:
        wanted.unreachable = False
        self.counts.vanished += 1
        logger.error("a message that could not be read is gone from the Mooncake store: its holder has died")
