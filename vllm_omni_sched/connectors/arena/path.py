"""Both sides of an arena as one path."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.inbox import Inbox
from vllm_omni_sched.connectors.arena.options import ArenaOptions, arena_name
from vllm_omni_sched.connectors.arena.outbox import Outbox
from vllm_omni_sched.connectors.base import Edge, Health, Lease, Path, Status, Traffic, name_of
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.lately import Losses
from vllm_omni_sched.connectors.lifetime import Lifetimes
from vllm_omni_sched.connectors.modality import Modality, modality_of
from vllm_omni_sched.errors import (
    ConfigError,
    CorruptMessageError,
    MessageTooLargeError,
    NoRoomError,
    PathClosedError,
    ReceiverBehindError,
    RendezvousError,
)

REAPED_PER_PUT = 2  # each put adds one
TUNE_EVERY = 256  # messages
BURY_EVERY = 5.0  # seconds
LOST = (
    *("refused", "expired", "given_back", "damaged"),
    *("corrupt", "foreign", "orphans_expired", "orphans_given_back"),
)
"""Counts that `health` reports as losses."""
FIRST_WAIT, LONGEST_WAIT = 50e-6, 2e-3  # seconds between two looks for room


_lifetimes = Lifetimes()


class ArenaPath(Path):
    """Carries messages between processes of this host and user that name the same arena.

    A message is copied once, into memory that was touched before, and received as a view of it; messages in the ring
    are copied out. A process makes its outbox at its first `put` and its inbox at its first `get`. In a forked child,
    the path is closed.

    Args:
        clock: clock of deadlines and ages; shared by all processes, because messages may outlive their senders.

    Raises:
        RendezvousError: see `meeting.arena_directory`.
        ConfigError: the environment names an invalid arena.
    """

    name = "arena"

    def __init__(
        self,
        options: ArenaOptions,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
    ) -> None:
        self._options, self._clock, self._sleep = options, clock, sleep
        self.directory, self._entered = meeting.enter(options.directory, options.arena or common_arena())
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._outbox: Outbox | None = None
        self._inbox: Inbox | None = None
        self._buried_at = clock()
        self._closed = ""  # what closed it, for messages
        self._refusals: dict[Edge, tuple[str, int]] = {}  # why the last put failed, and `Outbox.progress` then
        self._losses = Losses(LOST, clock)
        _lifetimes.add(self)

    def put(self, message: Message, deadline: float | None = None) -> int:
        held_bytes = self.put_unless(message, deadline, lambda: False)
        assert held_bytes is not None
        return held_bytes

    def put_unless(self, message: Message, deadline: float | None, unless: Callable[[], bool]) -> int | None:
        """Send as `put`; return None, without sending or counting, if ``unless`` becomes true while waiting for
        room.
        """
        edge, modality = message.edge, self._options.modality or modality_of(message)
        wait = FIRST_WAIT
        while True:
            with self._sending:
                outbox = self._sender()
                possible = outbox.can_hold(
                    message, modality
                )  # first, so that no pool grows for a message that never fits
                behind = possible and self._is_behind(outbox, edge, message.nbytes)
                held_bytes = self._put(outbox, message, modality) if possible and not behind else None
                if held_bytes is not None:
                    if self._refusals:
                        self._refusals.pop(edge, None)
                    outbox.reap(REAPED_PER_PUT)
                    if outbox.counts.put % TUNE_EVERY == 0:
                        outbox.storage.tune()
                    return held_bytes
                if not possible or deadline is None or self._clock() >= deadline:
                    why = self._why(outbox, message, modality, behind)
                    outbox.counts.refused += 1
                    if possible:
                        self._refusals[edge] = why, outbox.progress
                    kind = MessageTooLargeError if not possible else ReceiverBehindError if behind else NoRoomError
                    raise kind(why)
            if unless():
                return None
            self._sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def get(self, edge: Edge, key: str) -> Arrival | None:
        with self._receiving:
            try:
                inbox = self._receiver()
                self._bury(inbox)
                return inbox.get(name_of(edge, key))
            except OSError as error:
                raise self._cannot_look(error) from error

    def holds(self, edge: Edge, key: str) -> bool:
        with self._sending:
            return self._outbox is not None and not self._closed and self._outbox.holds(name_of(edge, key))

    def lease(self, edge: Edge, key: str) -> Lease | None:
        with self._receiving:
            try:
                inbox = self._receiver()
                holder = inbox.holder
            except OSError as error:
                raise self._cannot_look(error) from error
        with self._sending:
            try:
                found = self._outbox.lease(name_of(edge, key), holder) if self._outbox is not None else None
            except CorruptMessageError:
                inbox.counts.corrupt += 1
                raise
        if found is None:
            return None
        arrival, slot = found

        def end(returned: bool) -> bool:
            with self._sending:
                outbox = self._outbox if not self._closed else None
                return outbox is not None and outbox.end_lease(slot, arrival.generation, holder, returned)

        return Lease(arrival, lambda: end(False), lambda: end(True))

    def withdraw(self, edge: Edge, key: str) -> bool:
        with self._sending:
            outbox = self._outbox if not self._closed else None
            return outbox is not None and outbox.withdraw(name_of(edge, key))

    def discard(self, key: str) -> int:
        with self._sending:
            return self._outbox.discard(key) if self._outbox is not None and not self._closed else 0

    def reap(self, limit: int | None = None) -> int:
        with self._sending:
            return self._outbox.reap(limit) if self._outbox is not None and not self._closed else 0

    def traffic(self) -> dict[tuple[str, Edge], Traffic]:
        with self._sending:
            if self._outbox is None or self._closed:
                return {}
            self._outbox.reap()
            return {(self.name, edge): traffic for edge, traffic in self._outbox.traffic().items()}

    def health(self) -> Health:
        with self._sending, self._receiving:
            self.reap()
            if self._inbox is not None and not self._closed:
                with contextlib.suppress(OSError):
                    self._bury(self._inbox)
            facts: dict[str, Any] = {"directory": str(self.directory)}
            if self._outbox is not None:
                facts |= self._outbox.facts()
            if self._inbox is not None:
                facts |= self._inbox.facts()
            if self._closed:
                return Health(Status.CLOSED, f"the path was closed {self._closed}", facts)
            progress = self._outbox.progress if self._outbox is not None else 0
            sick = [why for why, before in self._refusals.values() if before == progress]
            if sick:
                return Health(Status.SICK, "; ".join(sick), facts)
            lately = self._losses.lately(facts)
            lately += [
                f"pool {name} cannot grow: {pool['refused']}"
                for name, pool in facts.get("pools", {}).items()
                if pool["refused"]
            ]
        return Health(Status.DEGRADED if lately else Status.HEALTHY, ", ".join(lately), facts)

    def close(self) -> None:
        with self._sending, self._receiving:
            if self._closed:
                return
            self._closed = "by its process"
            if self._outbox is not None:
                self._outbox.close()
            if self._inbox is not None:
                self._inbox.close()
            with contextlib.suppress(OSError):
                meeting.leave(self.directory, self._entered)

    def abandon(self) -> None:
        """Release what a forked child has inherited: it belongs to the parent, and its locks may be held forever."""
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        if self._closed:
            return
        self._closed = "by a fork, for the child,"
        for side in (self._outbox, self._inbox):
            if side is not None:
                side.abandon()
        self._outbox = self._inbox = None

    def _bury(self, inbox: Inbox) -> None:
        """Remove dead senders' outboxes, every few seconds."""
        if (now := self._clock()) - self._buried_at > BURY_EVERY:
            self._buried_at = now
            inbox.bury()

    def _receiver(self) -> Inbox:
        if self._closed:
            raise PathClosedError(f"the arena was closed {self._closed} before this get")
        if self._inbox is None:
            options = self._options
            self._inbox = Inbox(self.directory, self._entered, options.copy_out, options.ttl_seconds, self._clock)
        return self._inbox

    def _cannot_look(self, error: OSError) -> RendezvousError:
        return RendezvousError(f"cannot search for messages in {self.directory}: {error.strerror}")

    def _sender(self) -> Outbox:
        if self._closed:
            raise PathClosedError(f"the arena was closed {self._closed} before this put")
        if self._outbox is None:
            try:
                self._outbox = Outbox(self.directory, self._options, self._clock, self._sleep)
            except OSError as error:
                raise self._no_memory("an outbox", "`ring_bytes`", error) from error
        return self._outbox

    def _put(self, outbox: Outbox, message: Message, modality: Modality) -> int | None:
        try:
            held_bytes = outbox.put(message, modality)
            return outbox.put(message, modality) if held_bytes is None and outbox.reap() else held_bytes
        except OSError as error:
            raise self._no_memory("a pool", "`max_bytes`", error) from error

    def _no_memory(self, what: str, option: str, error: OSError) -> NoRoomError:
        return NoRoomError(
            f"no memory for {what} in {self.directory} ({error.strerror}): give its file system more room "
            f"(`docker run --shm-size`), or set the connector's {option} or `directory`"
        )

    def _is_behind(self, outbox: Outbox, edge: Edge, nbytes: int) -> bool:
        """Return whether an edge's receiver must receive before more is sent; one message is always allowed."""
        messages, window = self._options.max_inflight, self._options.window_size
        if messages is None and window is None:
            return False
        counts = outbox.counts
        for _ in range(2):
            over = messages is not None and counts.waiting[edge] >= messages
            over = over or (window is not None and counts.waiting_bytes[edge] + nbytes > window)
            if not over or not counts.waiting[edge]:
                return False
            before = outbox.progress
            outbox.reap()
            if outbox.progress == before:
                break
        return counts.waiting[edge] > 0

    def _why(self, outbox: Outbox, message: Message, modality: Modality, behind: bool) -> str:
        edge, pool = message.edge, outbox.storage.pool(modality)
        waiting = f"{outbox.counts.waiting[edge]} messages ({outbox.counts.waiting_bytes[edge]} bytes)"
        limit = self._options.pool(modality).max_bytes
        if not outbox.can_hold(message, modality):
            return (
                f"a message of {message.nbytes} bytes on edge {edge} is larger than pool {modality.value} may become; "
                f"raise its max_bytes ({limit})"
            )
        if behind:
            return f"edge {edge} has {waiting} not received yet (limits `max_inflight`, `window_size`)"
        what = f"no room for {message.nbytes} bytes on edge {edge}, where {waiting} wait"
        if pool is None or pool.extents.largest_free_bytes >= message.nbytes:
            return f"{what}: the index is full; raise max_messages ({self._options.max_messages})"
        if pool.refused:
            return f"{what}: pool {modality.value} cannot grow ({pool.refused}); give {self.directory} more room"
        return f"{what}: pool {modality.value} is full; raise its max_bytes ({limit})"


def common_arena() -> str:
    """Return the name of the arena that all processes started by one process share."""
    named = os.environ.get(meeting.ARENA_VARIABLE)
    if not named:
        return f"pid-{os.getpid()}"
    try:
        return arena_name(named)
    except ValueError as error:
        raise ConfigError(f"environment variable {meeting.ARENA_VARIABLE} {error}; it is {named[:80]!r}") from error
