"""Interface of transports, which carry messages from one stage to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from vllm_omni_sched.connectors.arrivals import Arrivals
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message, message_of


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


@dataclass(frozen=True)
class Lease:
    """Message that its sender withholds from receivers, to move it elsewhere; available again if the sender dies.

    Call one of the two functions, once. ``consume``: the message was moved, or is not needed any more. ``give_back``:
    receivers can get it again; returns whether they can.
    """

    arrival: Arrival
    consume: Callable[[], Any]
    give_back: Callable[[], bool]


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

    def holds(self, edge: Edge, key: str) -> bool:
        """Return whether a message of this process was not received yet; True if the transport cannot tell."""
        return True

    def lease(self, edge: Edge, key: str) -> Lease | None:
        """Lease a message of this process that was not received; its buffers are valid until the lease ends.

        By default, the message is received, and giving it back puts it again.

        Raises:
            CorruptMessageError: the message is damaged; it is dropped.
            TransportClosedError: after `close`.
        """
        arrival = self.get(edge, key)
        if arrival is None:
            return None
        return Lease(arrival, lambda: None, lambda: self.put(message_of(arrival, edge, key)) > 0)

    def withdraw(self, edge: Edge, key: str) -> bool:
        """Take back a message of this process, on one edge; return False if it was received, or is not there.

        Transports that can do this without reading the message override it.

        Raises:
            RendezvousError: the message could not be taken back, and may still be received.
            TransportClosedError: after `close`.
        """
        lease = self.lease(edge, key)
        if lease is not None:
            lease.consume()
        return lease is not None

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
