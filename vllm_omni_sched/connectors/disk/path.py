"""The path through files."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path as FilePath
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.path import common_arena
from vllm_omni_sched.connectors.base import Edge, Health, Lease, Path, Status, name_of
from vllm_omni_sched.connectors.disk import files
from vllm_omni_sched.connectors.disk.members import Members
from vllm_omni_sched.connectors.disk.options import DiskOptions
from vllm_omni_sched.connectors.disk.outbox import Outbox
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.lately import Losses
from vllm_omni_sched.connectors.lifetime import Lifetimes
from vllm_omni_sched.errors import (
    CorruptMessageError,
    MessageTooLargeError,
    NoRoomError,
    PathClosedError,
    RendezvousError,
)
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

REAPED_PER_PUT = 8
SWEEP_EVERY = 5.0  # seconds
LOST = ("refused", "expired", "corrupt", "given_back", "orphans_expired")
"""Counts that `health` reports as losses."""
FIRST_WAIT, LONGEST_WAIT = 1e-3, 50e-3  # seconds between two looks for room
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_lifetimes = Lifetimes()


class DiskPath(Path):
    """Messages in files, between processes of this host and user that name the same arena.

    1. A file is seen whole or not at all. Nothing is synced: it is to outlive processes, not the machine.
    2. Who gets a message has a copy of it as soon as `get` returns: what it dies with after that is not given back.
       One that dies in `get`, or with a lease, gives it back.
    3. The same key of an edge put by two processes is one message: the second replaces the first.
    4. Files of processes that died are got or expire; those that nobody can get go with the next sweep.

    A forked child does not inherit a path: there it is closed.

    Args:
        clock: against which deadlines and ages are; that of other processes, too, where their messages outlive them.

    Raises:
        RendezvousError: see `meeting.arena_directory`.
        ConfigError: the environment names an arena that cannot be.
    """

    name = "disk"

    def __init__(
        self,
        options: DiskOptions,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
    ) -> None:
        self._options, self._clock, self._sleep = options, clock, sleep
        self.directory, self._entered = meeting.enter(options.directory, options.arena or common_arena())
        try:
            self.members = Members(self.directory, clock, options.ttl_seconds)
        except OSError as error:
            meeting.leave(self.directory, self._entered)
            raise RendezvousError(f"cannot write to {self.directory}: {error.strerror}") from error
        self._outbox = Outbox(self.members, options, clock)
        self._counts = {"got": 0, "got_bytes": 0, "corrupt": 0}
        self._lock = threading.Lock()  # of the counts of what was got
        self._swept_at = clock()
        self._closed = ""  # by what
        self._refusal: tuple[str, int] | None = None  # why the last put failed, and `Outbox.progress` then
        self._losses = Losses(LOST, clock)
        _lifetimes.add(self)

    def put(self, message: Message, deadline: float | None = None) -> int:
        wait, outbox = FIRST_WAIT, self._outbox
        while True:
            self._check_open("put")
            outbox.reap(REAPED_PER_PUT)
            why = ""
            try:
                if outbox.put(message) or (outbox.reap() and outbox.put(message)):
                    self._refusal = None
                    return message.nbytes
            except OSError as error:
                if error.errno not in FULL:
                    raise RendezvousError(f"cannot write to {self.directory}: {error.strerror}") from error
                why = f"{self.directory} is full ({error.strerror})"
            possible = message.nbytes <= self._options.max_bytes
            if not possible or deadline is None or self._clock() >= deadline:
                raise self._no_room(message, possible, why)
            self._sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def get(self, edge: Edge, key: str) -> Arrival | None:
        self._check_open("get")
        self._sweep_now_and_then()
        name = name_of(edge, key)
        taken = self._take(name)
        if taken is None:
            return None
        arrival = self._read(taken, name, None, partial(self._end_get, name, taken))
        taken.unlink(missing_ok=True)
        with self._lock:
            self._counts["got"] += 1
            self._counts["got_bytes"] += arrival.nbytes
        return arrival

    def holds(self, edge: Edge, key: str) -> bool:
        return not self._closed and self._outbox.holds(name_of(edge, key))

    def lease(self, edge: Edge, key: str) -> Lease | None:
        self._check_open("lease")
        name = name_of(edge, key)
        try:
            found = self._outbox.lease(name)
        except OSError as error:
            raise self._cannot_look(error) from error
        if found is None:
            return None
        generation, taken = found
        end = partial(self._outbox.end_lease, name, generation, taken)
        arrival = self._read(taken, name, generation, end)
        return Lease(arrival, lambda: end(False), lambda: end(True))

    def withdraw(self, edge: Edge, key: str) -> bool:
        try:
            return not self._closed and self._outbox.withdraw(name_of(edge, key))
        except OSError as error:
            raise RendezvousError(f"cannot take back a message in {self.directory}: {error.strerror}") from error

    def discard(self, key: str) -> int:
        return 0 if self._closed else self._outbox.discard(key)

    def reap(self, limit: int | None = None) -> int:
        return 0 if self._closed else self._outbox.reap(limit)

    def health(self) -> Health:
        self.reap()
        if not self._closed:
            self._sweep_now_and_then()
        with self._lock:
            facts: dict[str, Any] = {"directory": str(self.directory), **self._counts}
        facts |= self._outbox.facts() | self.members.facts()
        if self._closed:
            return Health(Status.CLOSED, f"the path was closed {self._closed}", facts)
        if self._refusal is not None and self._refusal[1] == self._outbox.progress:
            return Health(Status.SICK, self._refusal[0], facts)
        lately = self._losses.lately(facts)
        return Health(Status.DEGRADED if lately else Status.HEALTHY, ", ".join(lately), facts)

    def close(self) -> None:
        if self._closed:
            return
        self.reap()
        self._closed = "by its process"
        self.members.close()
        with contextlib.suppress(OSError):
            meeting.leave(self.directory, self._entered)

    def abandon(self) -> None:
        """Release what a forked child has inherited: it belongs to the parent, and its locks may be held forever."""
        self._closed = self._closed or "by a fork, for the child,"
        self._lock = threading.Lock()
        self._outbox.abandon()

    def _take(self, name: bytes) -> FilePath | None:
        taken = self.members.own_file(name, files.TAKEN)
        try:
            os.rename(self.members.message(name), taken)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._cannot_look(error) from error
        return taken

    def _cannot_look(self, error: OSError) -> RendezvousError:
        return RendezvousError(f"cannot search for messages in {self.directory}: {error.strerror}")

    def _end_get(self, name: bytes, taken: FilePath, returned: bool) -> None:
        if returned:
            files.rename_if_free(taken, self.members.message(name))
        else:
            taken.unlink(missing_ok=True)

    def _read(self, taken: FilePath, name: bytes, generation: int | None, end: Callable[[bool], object]) -> Arrival:
        """Read a message; on failure call ``end``, with True if others can get the message again."""
        try:
            return Arrival(files.read(taken), name, generation)
        except CorruptMessageError:
            end(False)
            with self._lock:
                self._counts["corrupt"] += 1
            raise
        except BaseException as error:  # no memory, no descriptors: it can be got when there are some
            end(True)
            if isinstance(error, OSError):
                raise RendezvousError(f"cannot read a message in {self.directory}: {error.strerror}") from error
            raise

    def _sweep_now_and_then(self) -> None:
        if (now := self._clock()) - self._swept_at > SWEEP_EVERY:
            self._swept_at = now
            with contextlib.suppress(OSError):
                self.members.sweep()

    def _no_room(self, message: Message, possible: bool, why: str) -> NoRoomError:
        waiting = f"{self._outbox.waiting[message.edge]} messages"
        limit = self._options.max_bytes
        self._outbox.counts.refused += 1
        if not possible:
            return MessageTooLargeError(
                f"a message of {message.nbytes} bytes on edge {message.edge} is larger than the disk may get; "
                f"raise its max_bytes ({limit})"
            )
        why = why or f"raise the disk's max_bytes ({limit})"
        said = f"no room for {message.nbytes} bytes on edge {message.edge}, where {waiting} wait: {why}"
        self._refusal = said, self._outbox.progress
        return NoRoomError(said)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise PathClosedError(f"the path through files was closed {self._closed} before this {what}")
