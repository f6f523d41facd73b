"""Transport of messages through files."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import CorruptMessageError, MessageTooLargeError, NoRoomError, RendezvousError
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.transport import common_arena
from vllm_omni_sched.connectors.disk import files
from vllm_omni_sched.connectors.disk.members import Members
from vllm_omni_sched.connectors.disk.options import DiskOptions
from vllm_omni_sched.connectors.disk.outbox import Outbox
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.medium import MediumTransport, MessageCounts, Refusal
from vllm_omni_sched.connectors.transport import Lease

REAPED_PER_PUT = 8
SWEEP_EVERY = 5.0  # seconds
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTransport(MediumTransport):
    """Transport of messages through files, between processes of this host and user that name the same arena.

    1. A file appears complete or not at all. It is not synced: it survives processes, but not a crash of the machine.
    2. A receiver has a copy of a message as soon as `get` returns: if it dies after that, nothing is given back.
       One that dies in `get`, or with a lease, gives it back.
    3. The same key of an edge put by two processes is one message: the second replaces the first.
    4. Files of processes that died are received or expire; unreachable ones go with the next sweep.

    Args:
        clock: clock of deadlines and ages; shared by all processes, because messages may outlive their senders.

    Raises:
        RendezvousError: see `meeting.arena_directory`.
        ConfigError: the environment names an invalid arena.
    """

    name, title = "disk", "the disk transport"
    lost = ("refused", "expired", "corrupt", "given_back", "orphans_expired")
    first_wait, longest_wait = 1e-3, 50e-3

    def __init__(
        self,
        options: DiskOptions,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
    ) -> None:
        super().__init__(clock, sleep)
        self._options = options
        self.directory, self._entered = meeting.enter(options.directory, options.arena or common_arena())
        try:
            self.members = Members(self.directory, clock, options.ttl_seconds)
        except OSError as error:
            meeting.leave(self.directory, self._entered)
            raise RendezvousError(f"cannot write to {self.directory}: {error.strerror}") from error
        self._outbox = Outbox(self.members, options, clock)
        self._received = {"got": 0, "got_bytes": 0, "corrupt": 0}
        self._swept_at = clock()
        self._opened()

    @property
    def counts(self) -> MessageCounts:
        return self._outbox.counts

    def progress(self) -> int:
        return self._outbox.progress

    def _make_locks(self) -> None:
        super()._make_locks()
        self._count_lock = threading.Lock()  # of `_received`; the records of messages have their own

    def _send(self, message: Message) -> int | Refusal:
        outbox, limit = self._outbox, self._options.max_bytes
        if message.nbytes > limit:
            return Refusal(
                MessageTooLargeError,
                f"a message of {message.nbytes} bytes on edge {message.edge} is larger than the disk may get; "
                f"raise its max_bytes ({limit})",
            )
        outbox.reap(REAPED_PER_PUT)
        why = f"raise the disk's max_bytes ({limit})"
        try:
            if outbox.put(message) or (outbox.reap() and outbox.put(message)):
                return message.nbytes
        except OSError as error:
            if error.errno not in FULL:
                raise RendezvousError(f"cannot write to {self.directory}: {error.strerror}") from error
            why = f"{self.directory} is full ({error.strerror})"
        waiting = f"{outbox.waiting[message.edge]} messages"
        what = f"no room for {message.nbytes} bytes on edge {message.edge}, where {waiting} wait"
        return Refusal(NoRoomError, f"{what}: {why}")

    def _receive(self, edge: Edge, key: str) -> Arrival | None:
        self._sweep_now_and_then()
        name = name_of(edge, key)
        taken = self._take(name)
        if taken is None:
            return None
        arrival = self._read(taken, name, None, partial(self._end_get, name, taken))
        taken.unlink(missing_ok=True)
        with self._count_lock:
            self._received["got"] += 1
            self._received["got_bytes"] += arrival.nbytes
        return arrival

    def _holds(self, name: bytes) -> bool:
        return self._outbox.holds(name)

    def _lease(self, edge: Edge, key: str) -> Lease | None:
        name = name_of(edge, key)
        try:
            found = self._outbox.lease(name)
        except OSError as error:
            raise self._cannot_search(error) from error
        if found is None:
            return None
        generation, taken = found
        end = partial(self._outbox.end_lease, name, generation, taken)
        arrival = self._read(taken, name, generation, end)
        return Lease(arrival, lambda: end(False), lambda: end(True))

    def _withdraw(self, name: bytes) -> bool:
        try:
            return self._outbox.withdraw(name)
        except OSError as error:
            raise RendezvousError(f"cannot take back a message in {self.directory}: {error.strerror}") from error

    def _discard(self, key: str) -> int:
        return self._outbox.discard(key)

    def _reap(self, limit: int | None) -> int:
        return self._outbox.reap(limit)

    def _look_after(self) -> None:
        super()._look_after()
        self._sweep_now_and_then()

    def _facts(self) -> dict[str, Any]:
        with self._count_lock:
            facts: dict[str, Any] = {"directory": str(self.directory), **self._received}
        return facts | self._outbox.facts() | self.members.facts()

    def _before_close(self) -> None:
        self._reap(None)

    def _close(self) -> None:
        self.members.close()
        with contextlib.suppress(OSError):
            meeting.leave(self.directory, self._entered)

    def _abandon(self) -> None:
        self._outbox.abandon()

    def _take(self, name: bytes) -> Path | None:
        taken = self.members.own_file(name, files.TAKEN)
        try:
            os.rename(self.members.message(name), taken)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._cannot_search(error) from error
        return taken

    def _cannot_search(self, error: OSError) -> RendezvousError:
        return RendezvousError(f"cannot search for messages in {self.directory}: {error.strerror}")

    def _end_get(self, name: bytes, taken: Path, returned: bool) -> None:
        if returned:
            files.rename_if_free(taken, self.members.message(name))
        else:
            taken.unlink(missing_ok=True)

    def _read(self, taken: Path, name: bytes, generation: int | None, end: Callable[[bool], object]) -> Arrival:
        """Read a message; on failure call ``end``, with True if others can get the message again."""
        try:
            return Arrival(files.read(taken), name, generation)
        except CorruptMessageError:
            end(False)
            with self._count_lock:
                self._received["corrupt"] += 1
            raise
        except BaseException as error:  # no memory, no descriptors: it can be received when there are some
            end(True)
            if isinstance(error, OSError):
                raise RendezvousError(f"cannot read a message in {self.directory}: {error.strerror}") from error
            raise

    def _sweep_now_and_then(self) -> None:
        if (now := self._clock()) - self._swept_at > SWEEP_EVERY:
            self._swept_at = now
            with contextlib.suppress(OSError):
                self.members.sweep()
