"""Transport of messages through files."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import CorruptMessageError, MessageTooLargeError, NoRoomError, RendezvousError
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.options import GIB, KIB, arena_name
from vllm_omni_sched.connectors.arena.transport import common_arena
from vllm_omni_sched.connectors.bounds import Seconds, StoredBytes
from vllm_omni_sched.connectors.disk import files
from vllm_omni_sched.connectors.disk.files import Members
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.medium import EdgeCounts, MediumTransport, Refusal
from vllm_omni_sched.connectors.transport import InFlight, Traffic
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Sent:
    """A message in flight."""

    edge: Edge
    key: str
    name: bytes
    nbytes: int
    stamp: files.Stamp
    put_at: float


class Outbox:
    """Sender of the messages of one process; callers hold the transport's lock, receivers may act at any time.

    Args:
        max_bytes: most bytes of messages in flight.
        ttl_seconds: age at which a message that was not received expires.
        checksum: see `Message.write_to`.
    """

    def __init__(self, members: Members, max_bytes: int, ttl_seconds: float, checksum: bool, clock: Clock) -> None:
        self._members, self._max_bytes, self._ttl_seconds = members, max_bytes, ttl_seconds
        self._checksum, self._clock = checksum, clock
        self.used_bytes = 0
        self.sent: OrderedDict[bytes, Sent] = OrderedDict()  # by name; the message checked longest ago comes first
        self._by_key: dict[str, set[bytes]] = {}
        self._last: dict[Edge, Traffic] = {}  # the last received messages
        self.counts = EdgeCounts()
        self.progress = 0  # messages gone: it tells whether there may be room again

    def put(self, message: Message) -> bool:
        """Write a message and show it to receivers; return False if that would exceed ``max_bytes``.

        Raises:
            OSError: the file system does not take it; nothing has changed.
        """
        name, nbytes = message.name, message.nbytes
        if self.used_bytes + nbytes > self._max_bytes:
            return False
        path, put_at = self._members.own_file(name, files.UNFINISHED), self._clock()
        stamp = files.write(path, message, put_at, self._checksum)
        if name in self.sent:
            self._withdraw(self.sent[name], "replaced")
        os.rename(path, self._members.message(name))
        self._enter(Sent(message.edge, message.key, name, nbytes, stamp, put_at))
        return True

    def withdraw(self, name: bytes) -> bool:
        """Take back the message of that name; return False if it was received."""
        return name in self.sent and self._withdraw(self.sent[name], "discarded")

    def discard(self, key: str) -> int:
        """Take back the messages under ``key`` that were not received, on all edges; return how many."""
        return sum(self.withdraw(name) for name in list(self._by_key.get(key, ())))

    def reap(self, limit: int | None = None) -> int:
        """Check ``limit`` messages, longest unchecked first, and drop the records of finished ones; return how many."""
        before, now = self.progress, self._clock()
        for sent in list(islice(self.sent.values(), limit)):
            self.sent.move_to_end(sent.name)
            if now - sent.put_at > self._ttl_seconds:
                if self._withdraw(sent, "expired"):
                    logger.warning(
                        "message %r of edge %s expired, because it was not received in time", sent.key[:80], sent.edge
                    )
            elif files.stamp_of(self._members.message(sent.name)) != sent.stamp:
                self._forget(sent, "consumed")
        return self.progress - before

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        return {**self.counts.facts(), "in_flight": len(self.sent), "in_flight_bytes": self.used_bytes}

    def traffic(self) -> dict[Edge, Traffic]:
        """Return the messages in flight by edge, as of the last `reap`."""
        found = {edge: replace(last, waiting=[]) for edge, last in self._last.items()}
        for sent in self.sent.values():
            found.setdefault(sent.edge, Traffic()).waiting.append(InFlight(sent.put_at, sent.nbytes))
        return found

    def _withdraw(self, sent: Sent, why: str) -> bool:
        """Take back one message; return False if it was received."""
        taken = self._members.take(self._members.message(sent.name), sent.name, sent.stamp)
        if taken is not None:
            taken.unlink()
        self._forget(sent, "consumed" if taken is None else why)
        return taken is not None

    def _enter(self, sent: Sent) -> None:
        self.sent[sent.name] = sent
        self._by_key.setdefault(sent.key, set()).add(sent.name)
        self.used_bytes += sent.nbytes
        self.counts.waiting[sent.edge] += 1
        self.counts.waiting_bytes[sent.edge] += sent.nbytes
        self.counts.put += 1
        self.counts.put_bytes += sent.nbytes

    def _forget(self, sent: Sent, why: str) -> None:
        """Remove a message from the records."""
        del self.sent[sent.name]
        names = self._by_key[sent.key]
        names.discard(sent.name)
        if not names:
            del self._by_key[sent.key]
        self.used_bytes -= sent.nbytes
        self.counts.waiting[sent.edge] -= 1
        self.counts.waiting_bytes[sent.edge] -= sent.nbytes
        self.progress += 1
        setattr(self.counts, why, getattr(self.counts, why) + 1)
        if why == "consumed":
            self._last.setdefault(sent.edge, Traffic()).got(sent.put_at, self._clock())


REAPED_PER_PUT = 8
SWEEP_EVERY = 5.0  # seconds
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskOptions(BaseModel):
    """Options of the transport through files. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: str = Field("/var/tmp", description="Directory of the messages; its file system must not be in memory.")
    arena: str | None = Field(
        None,
        description="Name of the arena; processes with the same name see each other's messages; default: all processes "
        "that one vLLM-Omni has started.",
    )
    max_bytes: StoredBytes = Field(8 * GIB, ge=64 * KIB, description="Most bytes that a process keeps there.")
    ttl_seconds: Seconds = Field(
        600.0, gt=0, description="Age at which a message that was not received is dropped, and counted."
    )

    checksum: bool = Field(
        True, description="Messages carry a CRC-32 of their tensors, and one that was altered in its file is an error."
    )

    @field_validator("arena")
    @classmethod
    def _file_name(cls, value: str | None) -> str | None:
        return None if value is None else arena_name(value)

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError("must be absolute: the processes that meet there may work in different directories")
        return value


class DiskTransport(MediumTransport):
    """Transport of messages through files, between processes of this host and user that name the same arena.

    1. A file appears complete or not at all. It is not synced: it survives processes, but not a crash of the machine.
    2. A receiver has a copy of a message as soon as `get` returns: if it dies after that, nothing is given back.
       One that dies in `get` gives it back.
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
        limits = options.max_bytes, options.ttl_seconds, options.checksum
        self._outbox = Outbox(self.members, *limits, clock)
        self._received = {"got": 0, "got_bytes": 0, "corrupt": 0}
        self._swept_at = clock()
        self._opened()

    @property
    def counts(self) -> EdgeCounts:
        return self._outbox.counts

    def progress(self) -> int:
        return self._outbox.progress

    def credited(self) -> tuple[Mapping[Edge, int], Mapping[Edge, int]]:
        return self.counts.waiting, self.counts.waiting_bytes

    def _make_locks(self) -> None:
        super()._make_locks()
        self._send_lock = threading.RLock()
        self._count_lock = threading.Lock()  # of `_received`

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
        waiting = f"{outbox.counts.waiting[message.edge]} messages"
        what = f"no room for {message.nbytes} bytes on edge {message.edge}, where {waiting} wait"
        return Refusal(NoRoomError, f"{what}: {why}")

    def _receive(self, edge: Edge, key: str) -> Arrival | None:
        self._sweep_now_and_then()
        name = name_of(edge, key)
        taken = self._take(name)
        if taken is None:
            return None
        arrival = self._read(taken, name)
        taken.unlink(missing_ok=True)
        with self._count_lock:
            self._received["got"] += 1
            self._received["got_bytes"] += arrival.nbytes
        return arrival

    def _withdraw(self, edge: Edge, key: str) -> bool:
        try:
            return self._outbox.withdraw(name_of(edge, key))
        except OSError as error:
            raise RendezvousError(f"cannot take back a message in {self.directory}: {error.strerror}") from error

    def _discard(self, key: str) -> int:
        return self._outbox.discard(key)

    def _reap(self, limit: int | None) -> int:
        return self._outbox.reap(limit)

    def _traffic(self) -> Mapping[Edge, Traffic]:
        self._outbox.reap()
        return self._outbox.traffic()

    def _look_after(self) -> None:
        super()._look_after()
        self._sweep_now_and_then()

    def _facts(self) -> dict[str, Any]:
        with self._count_lock:
            facts: dict[str, Any] = {"directory": str(self.directory), **self._received}
        return facts | self._outbox.facts() | self.members.counts

    def _before_close(self) -> None:
        self._reap(None)

    def _close(self) -> None:
        self.members.close()
        with contextlib.suppress(OSError):
            meeting.leave(self.directory, self._entered)

    def _abandon(self) -> None:
        """Do nothing: files are the parent's."""

    def _take(self, name: bytes) -> Path | None:
        taken = self.members.own_file(name, files.TAKEN)
        try:
            os.rename(self.members.message(name), taken)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RendezvousError(f"cannot search for messages in {self.directory}: {error.strerror}") from error
        return taken

    def _read(self, taken: Path, name: bytes) -> Arrival:
        """Read a message that was taken; without memory or descriptors for that, it waits again."""
        try:
            return Arrival(files.read(taken), name)
        except CorruptMessageError:
            taken.unlink(missing_ok=True)
            with self._count_lock:
                self._received["corrupt"] += 1
            raise
        except BaseException as error:
            files.rename_if_free(taken, self.members.message(name))
            if isinstance(error, OSError):
                raise RendezvousError(f"cannot read a message in {self.directory}: {error.strerror}") from error
            raise

    def _sweep_now_and_then(self) -> None:
        if (now := self._clock()) - self._swept_at > SWEEP_EVERY:
            self._swept_at = now
            with contextlib.suppress(OSError):
                self.members.sweep()
