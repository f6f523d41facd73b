"""Writer of a process's messages, links and beacon into the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from vllm_omni_sched.config.errors import RendezvousError, TransportClosedError
from vllm_omni_sched.connectors.mooncake.buffers import BufferPool, PooledBuffer
from vllm_omni_sched.connectors.mooncake.calls import HangingError
from vllm_omni_sched.connectors.mooncake.ledger import Ledger, Sent
from vllm_omni_sched.connectors.mooncake.names import Names, link_key, make_link
from vllm_omni_sched.connectors.mooncake.store import NO_ROOM, OK, RPC, MasterGoneError, Store
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


class Writer:
    """Writer of objects into the store; it removes objects whose put completed too late.

    Attributes:
        life: number of the beacon, 0 before the first: as long as the beacon exists, a message that was put in that
            life and is missing was received.
    """

    def __init__(self, store: Store, buffers: BufferPool, ledger: Ledger, names: Names) -> None:
        self._store, self._buffers, self._ledger = store, buffers, ledger
        self._names, self._lives = names, count(1)
        self.life = 0
        self.config, self.leaving = store.config(), store.config(replicas=2, pinned=False)

    def room(self, nbytes: int) -> PooledBuffer:
        """Return room in the region, or otherwise outside it."""
        return self._ledger.release(nbytes) or self._buffers.make(nbytes)

    def message(self, sent: Sent, room: PooledBuffer, config: Any) -> bool:
        """Put the content of ``room``; return False if the store has no room.

        Raises:
            RendezvousError: the store does not take it; ``room`` is given back.
        """
        try:
            code = self._write(sent.stored, room, sent.nbytes, config, self.remove_later)
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

    def link(self, sent: Sent, config: Any) -> None:
        """Put a link to the key under which a message is stored.

        Raises:
            RendezvousError: the store does not take the link.
        """
        link = make_link(sent.generation)
        room = self.room(len(link))
        room.data[:] = bytearray(link)
        code = self._write(link_key(sent.plain), room, len(link), config)
        self._buffers.give_back(room)
        if code != OK:
            raise RendezvousError(f"message {sent.key[:80]!r} of {sent.edge} was not put: Mooncake says {code}")

    def beacon(self, life: int) -> str:
        return self._names.beacon(self._ledger.token, life)

    def light(self) -> None:
        """Put a new beacon.

        Raises:
            MasterGoneError: the store does not take the beacon.
        """
        room, life = self.room(8), next(self._lives)  # each time another: one that comes late says nothing
        room.data[:] = 1
        code = self._write(self.beacon(life), room, 8, self.config, self.remove_later)
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

    def remove_later(self, key: str) -> None:
        """Remove an object on a new thread, for callers on a thread that runs calls."""
        threading.Thread(target=self.remove_quietly, args=([key],), daemon=True).start()

    def remove_quietly(self, keys: list[str]) -> None:
        try:
            self._store.remove(keys)
        except (RendezvousError, TransportClosedError) as error:
            logger.warning("%d objects may stay in the Mooncake store: %s", len(keys), error)
