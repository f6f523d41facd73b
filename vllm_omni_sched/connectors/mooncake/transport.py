"""Transport of messages between hosts, through a Mooncake store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import NoRoomError, RendezvousError, TransportClosedError
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.medium import MediumTransport, Refusal
from vllm_omni_sched.connectors.mooncake.buffers import BufferPool
from vllm_omni_sched.connectors.mooncake.inbox import Inbox
from vllm_omni_sched.connectors.mooncake.ledger import OutboxCounts
from vllm_omni_sched.connectors.mooncake.options import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.outbox import Outbox
from vllm_omni_sched.connectors.mooncake.store import Store
from vllm_omni_sched.connectors.transport import Traffic
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

BUSY_WAIT, IDLE_WAIT = 0.25, 1.0  # seconds between two looks at the master, with and without messages in flight
ASK_AFTER = 32 << 20
"""Number of bytes put after which the master is asked at once which messages were received: memory that is reused soon
is faster, but asking while a message is in transfer delays it."""
HANDING_OVER = 5.0  # most seconds that `close` takes for messages that were not received


class MooncakeTransport(MediumTransport):
    """Transport of messages between processes whose Mooncake clients have the same master and namespace.

    1. A message is stored in its sender's segment, and crosses the network once, when it is received.
    2. It is kept until it is received, discarded or expires. A master that restarts has lost the messages in flight,
       which are counted.
    3. A call that does not return is given up. While the master does not answer, `get` finds nothing, and `put` waits
       until its deadline; the library is not called for anything else then.
    4. A receiver has a message as soon as `get` returns it: if the receiver dies after that, it is not given back.
    5. `close` moves messages that were not received to the segments of other processes, if there are any. The messages
       of a killed process are lost; the master, and so their receivers, know that after its `-client_ttl`.

    Raises:
        ConfigError: the library is not installed, or does not load.
        RendezvousError: there is no master.
    """

    name, title = "mooncake", "the transport to the Mooncake store"
    lost = ("refused", "expired", "lost", "vanished", "corrupt")
    first_wait, longest_wait = 1e-3, 50e-3

    def __init__(
        self,
        options: MooncakeOptions,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
    ) -> None:
        super().__init__(clock, sleep, options)
        self._options = options
        self._store = Store(options, clock)
        try:
            self._buffers = BufferPool(self._store, options.localbuf)
        except BaseException:
            self._store.close()
            raise
        self._outbox = Outbox(self._store, self._buffers, options, clock)
        self._inbox = Inbox(self._store, self._buffers, options, clock)
        self._wake = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="mooncake-keeper", daemon=True)
        self._keeper.start()
        self._opened()  # the library crashes if the interpreter ends while threads are in it

    @property
    def counts(self) -> OutboxCounts:
        return self._outbox.counts

    def progress(self) -> int:
        return self._outbox.progress

    def credited(self) -> tuple[Mapping[Edge, int], Mapping[Edge, int]]:
        return self.counts.waiting, self.counts.waiting_bytes

    def _send(self, message: Message) -> int | Refusal:
        edge = message.edge
        try:
            if self._store.sick:
                raise RendezvousError(f"edge {edge} takes no messages now: {self._store.sick}")
            if (behind := self._behind(edge, message.nbytes)) is not None:
                return behind
            if (held_bytes := self._outbox.put(message)) is not None:
                if self._outbox.unasked_bytes > ASK_AFTER:
                    self._wake.set()
                return held_bytes
            self._outbox.reap()
        except RendezvousError as error:
            return Refusal(type(error), str(error), self._answers)
        return Refusal(
            NoRoomError,
            f"no room for {message.nbytes} bytes on edge {edge}: the store is full, with "
            f"{self.counts.waiting[edge]} messages of this edge waiting; raise its `segment`",
        )

    def _receive(self, edge: Edge, key: str) -> Arrival | None:
        if self._store.sick:
            return None
        try:
            return self._inbox.get(edge, key)
        except RendezvousError:
            return None  # the message stays in the store; `health` reports the problem

    def _withdraw(self, edge: Edge, key: str) -> bool:
        return self._outbox.withdraw(name_of(edge, key))

    def _discard(self, key: str) -> int:
        return self._outbox.discard(key)

    def _reap(self, limit: int | None) -> int:
        try:
            return self._outbox.reap(limit)
        except RendezvousError:
            return 0

    def _traffic(self) -> Mapping[Edge, Traffic]:
        return self._outbox.traffic()

    def _look_after(self) -> None:
        if not self._store.sick:
            self._reap(None)

    def _facts(self) -> dict[str, Any]:
        return {
            "protocol": self._store.protocol,
            "segment": self._store.segment,
            "master": self._options.master,
            "buffer_used_bytes": self._buffers.used_bytes,
            "buffers_outside": self._buffers.own,
            "calls_given_up": self._store.calls.gave_up,
            **self._outbox.facts(),
            **self._inbox.facts(),
        }

    def _trouble(self) -> str:
        return self._store.sick

    def _close(self) -> None:
        self._wake.set()
        self._keeper.join(self._options.call_timeout_seconds)
        self._outbox.close(HANDING_OVER)
        self._store.close()

    def _abandon(self) -> None:
        """Do nothing: `Store` keeps the client, whose sockets a child shares with its parent."""

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
            except TransportClosedError:
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
