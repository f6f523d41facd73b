"""Interface of transports, which carry messages from one stage to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message


class Arrivals(ABC):
    """Tells which messages of one edge may be there, and sleeps until more may be.

    Read `ticket`, look, and `wait` with that ticket: a message that comes in between ends the wait. The look after that
    needs only what came since that ticket. Any thread may call.
    """

    @abstractmethod
    def ticket(self) -> Hashable:
        """Return a value that differs once a message of the edge was shown; others may change it, too."""

    @abstractmethod
    def may_be_there(self, keys: Sequence[str], since: Hashable = None) -> list[bool]:
        """Return, for each key, whether `Transport.get` may find its message; False means that it would not.

        Args:
            since: a ticket that was read before the last look for these messages, which found none of them.
        """

    @abstractmethod
    def wait(self, ticket: Hashable, seconds: float) -> None:
        """Sleep until a message of the edge is shown, at most ``seconds``, or not at all if ``ticket`` is outdated.

        It may return sooner, and in rare cases a message does not end the sleep.
        """

    @abstractmethod
    def wake(self) -> None:
        """End the sleep of all who wait for messages of the edge."""


class Status(str, Enum):
    """State of a transport, as reported by `Transport.health`."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # works, but has lost, reclaimed or refused messages recently
    SICK = "sick"  # refuses messages now
    CLOSED = "closed"


@dataclass(frozen=True)
class Health:
    """State of a transport: `facts` are numbers for monitors, `reason` explains a state other than healthy."""

    status: Status
    reason: str
    facts: dict[str, Any]


class InFlight(NamedTuple):
    """Message in flight: its time, in seconds of the monotonic clock, and its size."""

    since: float
    nbytes: int


@dataclass
class Traffic:
    """Traffic of one edge, as its sender sees it.

    Attributes:
        waiting: messages that were not received, with the times when they were put.
        held: messages that receivers still use, with the times when that was noticed.
        got_at: when the last received message was noticed.
        got_put_at: when the latest of the received messages was put.
    """

    waiting: list[InFlight] = field(default_factory=list)
    held: list[InFlight] = field(default_factory=list)
    got_at: float | None = None
    got_put_at: float | None = None

    def got(self, put_at: float, now: float) -> None:
        """Record that a message was received."""
        self.got_at = now
        if self.got_put_at is None or put_at > self.got_put_at:
            self.got_put_at = put_at

    def add(self, other: Traffic) -> None:
        """Add the messages of the same edge in another transport."""
        self.waiting += other.waiting
        self.held += other.held
        if other.got_at is not None and other.got_put_at is not None:
            self.got(other.got_put_at, max(other.got_at, self.got_at or other.got_at))


class Transport(ABC):
    """Transport of messages from one stage to another.

    1. A message is addressed by edge and key alone: no result of `put` has to reach the receiver.
    2. A message is received at most once by receivers that live; if one dies while it holds a message, the message can
       be received again.
    3. No message is lost silently: it is received, discarded by its sender, or expires and is counted.
    4. The same key on another edge is another message. A second `put` of a key that was not received yet replaces the
       first.
    5. `put` and `get` may be called from several threads.
    """

    name: str

    @abstractmethod
    def put(self, message: Message, deadline: float | None = None) -> int:
        """Send a message; return the bytes that the transport holds for it.

        Args:
            deadline: latest time to wait for room, on `clock.monotonic_seconds`; None for not waiting.

        Raises:
            NoRoomError: the transport is full.
            ReceiverBehindError: the receiver of the edge has to receive earlier messages first.
            MessageTooLargeError: the message will never fit.
            RendezvousError: the master or the directory through which processes meet cannot be used.
            PayloadError: a part of the payload cannot be written.
            TransportClosedError: after `close`.
        """

    @abstractmethod
    def get(self, edge: Edge, key: str) -> Arrival | None:
        """Return the message, or None if the transport has not found one yet.

        Its tensors may be views of the transport's memory, which is kept until all of them are dropped.

        Raises:
            CorruptMessageError: the message is damaged; it is dropped.
            RendezvousError: the transport cannot search for messages.
            TransportClosedError: after `close`.
        """

    def arrivals(self, edge: Edge) -> Arrivals | None:
        """Return who tells when messages of an edge are there; None if receivers must ask for each."""
        return None

    def withdraw(self, edge: Edge, key: str) -> bool:
        """Take back a message of this process, on one edge; return False if it was received, or is not there.

        By default it is received and dropped.

        Raises:
            RendezvousError: the message could not be taken back, and may still be received.
            TransportClosedError: after `close`.
        """
        return self.get(edge, key) is not None

    @abstractmethod
    def discard(self, key: str) -> int:
        """Take back the messages of this process under ``key``, on any edge; return how many.

        Received messages stay valid.
        """

    @abstractmethod
    def reap(self, limit: int | None = None) -> int:
        """Check ``limit`` messages in flight (None for all) and free the room of finished ones; return how many."""

    def carrier(self) -> str:
        """Return the name of the transport that carried this thread's last message, if this one combines several."""
        return self.name

    def traffic(self) -> Mapping[tuple[str, Edge], Traffic]:
        """Return the messages that this process has put, by transport and edge; empty if a transport cannot tell."""
        return {}

    @abstractmethod
    def health(self) -> Health:
        """Return the current state of the transport."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent. Messages in flight stay for receivers that live."""
