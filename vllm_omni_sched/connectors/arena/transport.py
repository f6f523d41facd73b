"""Transport of messages through shared memory, between processes of one host."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import (
    ConfigError,
    MessageTooLargeError,
    NoRoomError,
    RendezvousError,
)
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.inbox import Inbox, Shown
from vllm_omni_sched.connectors.arena.options import ArenaOptions, Modality, arena_name, modality_of
from vllm_omni_sched.connectors.arena.outbox import Outbox, OutboxCounts
from vllm_omni_sched.connectors.arena.wake import WakeWords, wake_words, word_of
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.medium import MediumTransport, Refusal
from vllm_omni_sched.connectors.transport import Arrivals, Traffic


class ArenaArrivals(Arrivals):
    """Arrivals of one edge, from the counters and indexes of all senders; sleeps on the word of the edge.

    Args:
        sleep: used instead of the word once the transport is closed, so that receivers do not spin.
    """

    def __init__(self, transport: ArenaTransport, edge: Edge, words: WakeWords, sleep: Callable[[float], None]) -> None:
        self._transport, self._edge, self._words, self._sleep = transport, edge, words, sleep
        self._word = word_of(edge)

    def ticket(self) -> Hashable:
        value = self._words.value(self._word)  # before the counters: what is shown later changes it later
        return value, self._transport.shown()

    def may_be_there(self, keys: Sequence[str], since: Hashable = None) -> list[bool]:
        shown = since[1] if isinstance(since, tuple) else None
        return self._transport.may_be_there([name_of(self._edge, key) for key in keys], shown)

    def wait(self, ticket: Hashable, seconds: float) -> None:
        assert isinstance(ticket, tuple)
        value, shown = ticket
        if shown is None:
            self._sleep(seconds)
        else:
            self._words.wait(self._word, value, seconds)

    def wake(self) -> None:
        self._words.wake(self._word)


REAPED_PER_PUT = 2  # each put adds one
TUNE_EVERY = 256  # messages
BURY_EVERY = 5.0  # seconds


class ArenaTransport(MediumTransport):
    """Transport of messages between processes of this host and user that name the same arena.

    A message is copied once, into memory that was touched before, and received as a view of it; messages in the ring
    are copied out. A process makes its outbox at its first `put` and its inbox at its first `get`.

    Args:
        clock: clock of deadlines and ages; shared by all processes, because messages may outlive their senders.

    Raises:
        RendezvousError: see `meeting.arena_directory`.
        ConfigError: the environment names an invalid arena.
    """

    name, title = "arena", "the arena"
    lost = (
        "refused",
        "expired",
        "given_back",
        "damaged",
        "corrupt",
        "foreign",
        "orphans_expired",
        "orphans_given_back",
    )
    first_wait, longest_wait = 50e-6, 2e-3

    def __init__(
        self,
        options: ArenaOptions,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
    ) -> None:
        super().__init__(clock, sleep, options)
        self._options = options
        self.directory, self._entered = meeting.enter(options.directory, options.arena or common_arena())
        self._outbox: Outbox | None = None
        self._inbox: Inbox | None = None
        self._words: WakeWords | None = wake_words(self.directory) if options.wake_receivers else None
        self._buried_at = clock()
        self._opened()

    @property
    def counts(self) -> OutboxCounts:
        return OutboxCounts() if self._outbox is None else self._outbox.counts

    def progress(self) -> int:
        return self._outbox.progress if self._outbox is not None else 0

    def credited(self) -> tuple[Mapping[Edge, int], Mapping[Edge, int]]:
        counts = self.counts
        return counts.waiting, counts.waiting_bytes

    def arrivals(self, edge: Edge) -> Arrivals | None:
        words = self._words
        return None if words is None else ArenaArrivals(self, edge, words, self._sleep)

    def shown(self) -> Shown | None:
        """Return the counters of all senders; None once this transport is closed, or cannot search."""
        with self._receive_lock:
            try:
                return None if self._closed else self._receiver().shown()
            except OSError:
                return None

    def may_be_there(self, names: Sequence[bytes], since: Shown | None) -> list[bool]:
        """Return, for each name of a message, whether `get` may find it, or report an error; see `Inbox`."""
        with self._receive_lock:
            try:
                return [True] * len(names) if self._closed else self._receiver().may_be_there(names, since)
            except OSError:
                return [True] * len(names)

    def _make_locks(self) -> None:
        super()._make_locks()
        self._send_lock, self._receive_lock = threading.RLock(), threading.RLock()

    def _send(self, message: Message) -> int | Refusal:
        outbox, modality = self._outbox or self._sender(), self._options.modality or modality_of(message)
        # first, so that no pool grows for a message that never fits
        if message.nbytes > outbox.storage.smallest_pool_bytes and not outbox.can_hold(message, modality):
            limit = self._options.pool(modality).max_bytes
            return Refusal(
                MessageTooLargeError,
                f"a message of {message.nbytes} bytes on edge {message.edge} is larger than pool {modality.value} may "
                f"become; raise its max_bytes ({limit})",
            )
        if self._credit is not None and (behind := self._behind(message.edge, message.nbytes)) is not None:
            return behind
        try:
            held_bytes = outbox.put(message, modality, self._words)
            if held_bytes is None and outbox.reap():
                held_bytes = outbox.put(message, modality, self._words)
        except OSError as error:
            raise self._no_memory("a pool", "`max_bytes`", error) from error
        if held_bytes is None:
            return Refusal(NoRoomError, self._why_full(outbox, message, modality))
        outbox.reap(REAPED_PER_PUT)
        if outbox.counts.put % TUNE_EVERY == 0:
            outbox.storage.tune()
        return held_bytes

    def _receive(self, edge: Edge, key: str) -> Arrival | None:
        try:
            inbox = self._inbox or self._receiver()
            if self._clock() - self._buried_at > BURY_EVERY:
                self._bury(inbox)
            return inbox.get(name_of(edge, key))
        except OSError as error:
            raise self._cannot_search(error) from error

    def _withdraw(self, edge: Edge, key: str) -> bool:
        return self._outbox is not None and self._outbox.withdraw(name_of(edge, key))

    def _discard(self, key: str) -> int:
        return self._outbox.discard(key) if self._outbox is not None else 0

    def _reap(self, limit: int | None) -> int:
        return self._outbox.reap(limit) if self._outbox is not None else 0

    def _traffic(self) -> Mapping[Edge, Traffic]:
        if self._outbox is None:
            return {}
        self._outbox.reap()
        return self._outbox.traffic()

    def _look_after(self) -> None:
        super()._look_after()
        if self._inbox is not None:
            with contextlib.suppress(OSError):
                self._bury(self._inbox)

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"directory": str(self.directory)}
        for side in (self._outbox, self._inbox):
            facts |= side.facts() if side is not None else {}
        return facts

    def _warnings(self, facts: Mapping[str, Any]) -> list[str]:
        pools = facts.get("pools", {}).items()
        return [f"pool {name} cannot grow: {pool['refused']}" for name, pool in pools if pool["refused"]]

    def _close(self) -> None:
        for side in (self._outbox, self._inbox):
            if side is not None:
                side.close()
        with contextlib.suppress(OSError):
            meeting.leave(self.directory, self._entered)

    def _abandon(self) -> None:
        for side in (self._outbox, self._inbox):
            if side is not None:
                side.abandon()
        self._outbox = self._inbox = self._words = None

    def _bury(self, inbox: Inbox) -> None:
        """Remove dead senders' outboxes, every few seconds."""
        if (now := self._clock()) - self._buried_at > BURY_EVERY:
            self._buried_at = now
            inbox.bury()

    def _receiver(self) -> Inbox:
        if self._inbox is None:
            options = self._options
            self._inbox = Inbox(self.directory, self._entered, options.copy_out, options.ttl_seconds, self._clock)
        return self._inbox

    def _sender(self) -> Outbox:
        if self._outbox is None:
            try:
                self._outbox = Outbox(self.directory, self._options, self._clock, self._sleep)
            except OSError as error:
                raise self._no_memory("an outbox", "`ring_bytes`", error) from error
        return self._outbox

    def _cannot_search(self, error: OSError) -> RendezvousError:
        return RendezvousError(f"cannot search for messages in {self.directory}: {error.strerror}")

    def _no_memory(self, what: str, option: str, error: OSError) -> NoRoomError:
        return NoRoomError(
            f"no memory for {what} in {self.directory} ({error.strerror}): give its file system more room "
            f"(`docker run --shm-size`), or set the connector's {option} or `directory`"
        )

    def _why_full(self, outbox: Outbox, message: Message, modality: Modality) -> str:
        edge, pool = message.edge, outbox.storage.pool(modality)
        waiting = f"{outbox.counts.waiting[edge]} messages ({outbox.counts.waiting_bytes[edge]} bytes)"
        what = f"no room for {message.nbytes} bytes on edge {edge}, where {waiting} wait"
        if pool is None or pool.extents.largest_free_bytes >= message.nbytes:
            return f"{what}: the index is full; raise max_messages ({self._options.max_messages})"
        if pool.refused:
            return f"{what}: pool {modality.value} cannot grow ({pool.refused}); give {self.directory} more room"
        limit = self._options.pool(modality).max_bytes
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
