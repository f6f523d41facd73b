"""Both sides of a Mooncake store as one path."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.connectors.base import Edge, Health, Lease, Path, Status, Traffic, name_of
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.lately import Losses
from vllm_omni_sched.connectors.mooncake.inbox import Inbox
from vllm_omni_sched.connectors.mooncake.options import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.outbox import Outbox
from vllm_omni_sched.connectors.mooncake.rooms import Rooms
from vllm_omni_sched.connectors.mooncake.store import Store
from vllm_omni_sched.errors import (
    ConnectorError,
    NoRoomError,
    PathClosedError,
    ReceiverBehindError,
    RendezvousError,
)
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

LOST = ("refused", "expired", "lost", "vanished", "corrupt")
"""Counts that `health` reports as losses."""
FIRST_WAIT, LONGEST_WAIT = 1e-3, 50e-3  # seconds between two looks for room
BUSY_WAIT, IDLE_WAIT = 0.25, 1.0  # seconds between two looks at the master, with and without messages in flight
ASK_AFTER = 32 << 20
"""After so many bytes the master is asked at once what was got: memory that is used again soon is quick memory, but
asking while a message is on its way holds that up."""
LOOKS = 8  # for a message that is to be leased
HANDING_OVER = 5.0  # seconds that `close` takes at most for messages that nobody has got


class MooncakePath(Path):
    """Messages between processes whose Mooncake clients have the same master and namespace.

    1. A message lies in its sender's segment, and goes through the network once, when it is got.
    2. It is kept until it is got, discarded or expires: a master that comes back is told again of what nobody got yet.
    3. A call that the library does not come back from is given up. While the master is gone, `get` finds nothing,
       and `put` waits for it up to its deadline; nothing else is asked of the library then.
    4. A receiver has a message as soon as `get` returns it: what it dies with after that is not given back.
    5. `close` leaves messages that nobody got to the segments of others, if there are any. A process that is killed
       takes them with it; the master, and so their receivers, know that after its `-client_ttl`.

    Raises:
        ConfigError: the library is not installed, or does not load.
        RendezvousError: there is no master.
    """

    name = "mooncake"

    def __init__(
        self,
        options: MooncakeOptions,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
    ) -> None:
        self._options, self._clock, self._sleep = options, clock, sleep
        self._store = Store(options, clock)
        try:
            self._rooms = Rooms(self._store, options.localbuf)
        except BaseException:
            self._store.close()
            raise
        self._outbox = Outbox(self._store, self._rooms, options, clock)
        self._inbox = Inbox(self._store, self._rooms, options, clock)
        self._refusals: dict[Edge, tuple[str, Callable[[], int], int]] = {}
        """Why the last put of an edge failed, a count, and what it was then: until it changes, the next fails, too."""
        self._losses = Losses(LOST, clock)
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._wake = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="mooncake-keeper", daemon=True)
        self._keeper.start()
        _close_at_exit(self)

    def put(self, message: Message, deadline: float | None = None) -> int:
        edge, wait = message.edge, FIRST_WAIT
        while True:
            self._check_open("put")
            refusal: ConnectorError | None = None
            try:
                if self._store.sick:
                    raise RendezvousError(f"edge {edge} takes no messages now: {self._store.sick}")
                if self._is_behind(message):
                    refusal = self._behind(edge)
                elif (held_bytes := self._outbox.put(message)) is not None:
                    self._refusals.pop(edge, None)
                    if self._outbox.unasked_bytes > ASK_AFTER:
                        self._wake.set()
                    return held_bytes
                else:
                    self._outbox.reap()
            except RendezvousError as error:
                refusal = error
            if deadline is None or self._clock() >= deadline:
                self._outbox.counts.refused += 1
                refusal = refusal or self._no_room(message)
                until = self._answers if isinstance(refusal, RendezvousError) else self._progress
                self._refusals[edge] = str(refusal), until, until()
                raise refusal
            self._sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def get(self, edge: Edge, key: str) -> Arrival | None:
        self._check_open("get")
        if self._store.sick:
            return None
        try:
            return self._inbox.get(edge, key)
        except RendezvousError:
            return None  # it is where it was; `health` says what is wrong

    def holds(self, edge: Edge, key: str) -> bool:
        if self._closed or self._is_in_a_child():
            return False
        return self._outbox.holds(name_of(edge, key))

    def lease(self, edge: Edge, key: str) -> Lease | None:
        for _ in range(LOOKS):
            if not self.holds(edge, key):
                return None
            if (found := super().lease(edge, key)) is not None:
                return self._unless_put_again(found, name_of(edge, key))
            self._sleep(self._options.poll_seconds)  # `get` does not look for one name all the time
        return None

    def _unless_put_again(self, lease: Lease, name: bytes) -> Lease:
        def give_back() -> bool:
            return not self._outbox.is_put_again(name, lease.arrival.generation) and lease.give_back()

        return replace(lease, give_back=give_back)

    def withdraw(self, edge: Edge, key: str) -> bool:
        return not self._closed and not self._is_in_a_child() and self._outbox.withdraw(name_of(edge, key))

    def discard(self, key: str) -> int:
        if self._closed or self._is_in_a_child():
            return 0
        return self._outbox.discard(key)

    def reap(self, limit: int | None = None) -> int:
        if self._closed or self._is_in_a_child():
            return 0
        try:
            return self._outbox.reap(limit)
        except RendezvousError:
            return 0

    def traffic(self) -> dict[tuple[str, Edge], Traffic]:
        if self._closed or self._is_in_a_child():
            return {}
        return {(self.name, edge): traffic for edge, traffic in self._outbox.traffic().items()}

    def health(self) -> Health:
        if not self._store.sick:
            self.reap()
        facts: dict[str, Any] = {
            "protocol": self._store.protocol,
            "segment": self._store.segment,
            "master": self._options.master,
            "buffer_used_bytes": self._rooms.used_bytes,
            "buffers_outside": self._rooms.own,
            "calls_given_up": self._store.calls.gave_up,
            **self._outbox.facts(),
            **self._inbox.facts(),
        }
        if self._closed or self._is_in_a_child():
            return Health(Status.CLOSED, "the path was closed", facts)
        sick = [why for why, until, before in list(self._refusals.values()) if until() == before]
        if self._store.sick or sick:
            return Health(Status.SICK, self._store.sick or "; ".join(sick), facts)
        lost = self._losses.lately(facts)
        return Health(Status.DEGRADED if lost else Status.HEALTHY, ", ".join(lost), facts)

    def close(self) -> None:
        if self._is_in_a_child():
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._wake.set()
            self._keeper.join(self._options.call_timeout_seconds)
            self._outbox.close(HANDING_OVER)
            self._store.close()

    def _keep(self) -> None:
        """Monitor the master and the messages in the store, until `close`."""
        wait = IDLE_WAIT
        while True:
            self._wake.wait(wait)
            if self._closed:
                return
            self._wake.clear()
            was = self._store.sick
            try:
                done = self._outbox.reap()
                self._inbox.tidy()
                if was or not self._outbox.sent:
                    self._store.exist(["is there anybody"])
            except PathClosedError:
                return
            except RendezvousError as error:
                self._store.sick = self._store.sick or str(error)
                if not was:
                    logger.warning("%s; messages wait until it answers again", error)
                wait = IDLE_WAIT / 2
                continue
            if was and not self._store.sick:
                logger.warning("the Mooncake master at %s answers again", self._options.master)
            if done:
                wait = BUSY_WAIT
            elif self._outbox.sent:
                wait = min(max(2 * wait, BUSY_WAIT), IDLE_WAIT) if wait < IDLE_WAIT else BUSY_WAIT
            else:
                wait = IDLE_WAIT

    def _answers(self) -> int:
        return self._store.answers

    def _progress(self) -> int:
        return self._outbox.progress

    def _behind(self, edge: Edge) -> ReceiverBehindError:
        counts = self._outbox.counts
        waiting = f"{counts.waiting[edge]} messages ({counts.waiting_bytes[edge]} bytes)"
        return ReceiverBehindError(f"edge {edge} has {waiting} not received yet (limits `max_inflight`, `window_size`)")

    def _no_room(self, message: Message) -> NoRoomError:
        return NoRoomError(
            f"no room for {message.nbytes} bytes on edge {message.edge}: the store is full, with "
            f"{self._outbox.counts.waiting[message.edge]} messages of this edge waiting; raise its `segment`"
        )

    def _is_behind(self, message: Message) -> bool:
        """Return whether an edge's receiver must receive before more is sent; one message is always allowed."""
        messages, window, counts = self._options.max_inflight, self._options.window_size, self._outbox.counts
        for attempt in range(2):
            waiting = counts.waiting[message.edge]
            over = messages is not None and waiting >= messages
            over = over or (window is not None and counts.waiting_bytes[message.edge] + message.nbytes > window)
            if not (over and waiting):
                return False
            if not attempt:
                self._outbox.reap()
        return True

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise PathClosedError(f"the path to the Mooncake store was closed before this {what}")
        if self._is_in_a_child():
            raise PathClosedError("this process was forked from the one whose path this is: make one of its own")

    def _is_in_a_child(self) -> bool:
        return os.getpid() != self._pid


def _close_at_exit(path: MooncakePath) -> None:
    """Close the path at exit, because the library crashes if the interpreter ends while threads are in it."""
    kept = weakref.ref(path)

    def close() -> None:
        if (path := kept()) is not None:
            path.close()

    atexit.register(close)
