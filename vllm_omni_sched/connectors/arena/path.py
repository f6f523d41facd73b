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
from vllm_omni_sched.connectors.arena.options import ArenaOptions
from vllm_omni_sched.connectors.arena.outbox import POOLS, Outbox
from vllm_omni_sched.connectors.base import Edge, Health, Path, Status, name_of
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.modality import Modality, modality_of
from vllm_omni_sched.errors import NoRoomError, PathClosedError

REAPED_PER_PUT = 8
BURY_EVERY = 5.0  # seconds
LOST = ("refused", "expired", "given_back", "corrupt", "foreign")
"""Counts that `health` speaks of."""
FIRST_WAIT, LONGEST_WAIT = 50e-6, 2e-3  # seconds between two looks for room


class ArenaPath(Path):
    """Messages between processes of this host and user that name the same arena.

    A message is copied once, into memory that was touched before, and got as a view of it. What the ring has taken is
    copied out. A process makes its outbox at its first `put` and its inbox at its first `get`.

    Raises:
        RendezvousError: see `meeting.arena_directory`.
    """

    name = "arena"

    def __init__(
        self,
        options: ArenaOptions,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
    ) -> None:
        self._options, self._clock, self._sleep = options, clock, sleep
        arena = options.arena or os.environ.get(meeting.ARENA_VARIABLE) or f"pid-{os.getpid()}"
        self.directory, self._entered = meeting.enter(options.directory, arena)
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._outbox: Outbox | None = None
        self._inbox: Inbox | None = None
        self._buried_at = clock()
        self._closed = False

    def put(self, message: Message, deadline: float | None = None) -> int:
        edge = message.edge
        wait = FIRST_WAIT
        while True:
            with self._sending:
                outbox = self._sender()
                outbox.reap(REAPED_PER_PUT)
                behind = self._is_behind(outbox, edge, message.nbytes)
                if not behind:
                    for everything in (False, True):
                        if everything and not outbox.reap():
                            break
                        sent = outbox.put(message, self._modality(message))
                        if sent is not None:
                            return sent.held_bytes
                if deadline is None or self._clock() >= deadline:
                    outbox.counts.refused += 1
                    raise NoRoomError(self._why(outbox, edge, message, behind))
            self._sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def get(self, edge: Edge, key: str) -> Arrival | None:
        with self._receiving:
            if self._closed:
                raise PathClosedError("the arena was closed before this get")
            if self._inbox is None:
                self._inbox = Inbox(self.directory, self._options.copy_out, self._clock)
            if (now := self._clock()) - self._buried_at > BURY_EVERY:
                self._buried_at = now
                self._inbox.bury()
            return self._inbox.get(name_of(edge, key))

    def discard(self, key: str) -> int:
        with self._sending:
            return self._outbox.discard(key) if self._outbox is not None else 0

    def reap(self, limit: int | None = None) -> int:
        with self._sending:
            return self._outbox.reap(limit) if self._outbox is not None else 0

    def health(self) -> Health:
        with self._sending, self._receiving:
            facts: dict[str, Any] = {"directory": str(self.directory)}
            if self._outbox is not None:
                facts |= self._outbox.facts()
            if self._inbox is not None:
                facts |= self._inbox.facts()
            if self._closed:
                return Health(Status.CLOSED, "it was closed", facts)
        full = [name for name, pool in facts.get("pools", {}).items() if pool["refused"]]
        lost = [f"{facts[name]} {name}" for name in LOST if facts.get(name)]
        if full:
            return Health(Status.SICK, f"no more room in pool {', '.join(full)}", facts)
        return Health(Status.DEGRADED if lost else Status.HEALTHY, ", ".join(lost), facts)

    def close(self) -> None:
        with self._sending, self._receiving:
            if self._closed:
                return
            self._closed = True
            if self._outbox is not None:
                self._outbox.close()
            if self._inbox is not None:
                self._inbox.close()
            with contextlib.suppress(OSError):
                meeting.leave(self.directory, self._entered)

    def _sender(self) -> Outbox:
        if self._closed:
            raise PathClosedError("the arena was closed before this put")
        if self._outbox is None:
            try:
                self._outbox = Outbox(self.directory, self._options, self._clock)
            except OSError as error:
                raise NoRoomError(
                    f"no memory for an outbox in {self.directory} ({error.strerror}): give its file system more room "
                    "(`docker run --shm-size`), or set the connector's `ring_bytes` or `directory`"
                ) from error
        return self._outbox

    def _is_behind(self, outbox: Outbox, edge: Edge, nbytes: int) -> bool:
        """Whether the receiver of an edge must get something before more is sent; one message is always let through."""
        limits = (self._options.max_inflight, self._options.window_size)
        if limits == (None, None) or not outbox.counts.waiting[edge]:
            return False
        messages, window = limits
        for _ in range(2):
            over = messages is not None and outbox.counts.waiting[edge] >= messages
            over = over or (window is not None and outbox.counts.waiting_bytes[edge] + nbytes > window)
            if not over or not outbox.reap():
                break
        return over and outbox.counts.waiting[edge] > 0

    def _modality(self, message: Message) -> Modality:
        return self._options.modality or modality_of(message)

    def _why(self, outbox: Outbox, edge: Edge, message: Message, behind: bool) -> str:
        waiting = f"{outbox.counts.waiting[edge]} messages ({outbox.counts.waiting_bytes[edge]} bytes)"
        if behind:
            return f"edge {edge} has {waiting} that nobody has got (its `max_inflight` or `window_size`)"
        modality = self._modality(message)
        pool = outbox.pools.get(POOLS[modality])
        refused = pool.refused if pool is not None else "the index has no free slot"
        return (
            f"no room for {message.payload_bytes} bytes on edge {edge}, where {waiting} wait: pool {modality.value} "
            f"does not grow, {refused}; raise its max_bytes, or max_messages"
        )
