"""What a path between two stages is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm_omni_sched.connectors.framing import Arrival, Message


class Edge(NamedTuple):
    """From one stage to another, by the names that vLLM-Omni gives them."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


def name_of(edge: Edge, key: str) -> bytes:
    """Edge and key in one, different for different ones: every part has its length in front."""
    return _name(edge, key) if len(key) > LONG_KEY else _cached_name(edge, key)


def _name(edge: Edge, key: str) -> bytes:
    return _prefix(edge) + key.encode("utf-8", "surrogatepass")


_cached_name = lru_cache(maxsize=4096)(_name)  # receivers ask for the same ones again and again
LONG_KEY = 256
"""Characters: longer keys are not remembered."""


@lru_cache(maxsize=1024)
def _prefix(edge: Edge) -> bytes:
    parts = [part.encode("utf-8", "surrogatepass") for part in edge]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class Status(str, Enum):
    """What `Path.health` says in one word."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # works, and something was lost, reclaimed or refused lately
    SICK = "sick"  # refuses messages now
    CLOSED = "closed"


@dataclass(frozen=True)
class Health:
    """State of a path: `facts` are numbers for people and monitors, `reason` says what is not well."""

    status: Status
    reason: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Lease:
    """A message that its sender keeps from receivers, to put it elsewhere. If the process dies, they can get it.

    ``consume``: it is elsewhere now, or not wanted any more. ``give_back``: others can get it again; whether they can.
    One of them is called, once.
    """

    arrival: Arrival
    consume: Callable[[], Any]
    give_back: Callable[[], bool]


class InFlight(NamedTuple):
    """A message on its way: since when, in seconds of the monotonic clock, and its size."""

    since: float
    nbytes: int


@dataclass
class Traffic:
    """Of one edge, as its sender sees it.

    Attributes:
        waiting: messages that nobody has got, since they were put.
        held: messages whose receiver looks at them still, since that was seen.
        got_at: when it was last seen that one was got.
        got_put_at: when the latest of those that were got was put.
    """

    waiting: list[InFlight] = field(default_factory=list)
    held: list[InFlight] = field(default_factory=list)
    got_at: float | None = None
    got_put_at: float | None = None

    def got(self, put_at: float, now: float) -> None:
        """Note that a message was got."""
        self.got_at = now
        self.got_put_at = put_at if self.got_put_at is None else max(put_at, self.got_put_at)


class Path(ABC):
    """One way for messages to go from stage to stage.

    1. A message is addressed by edge and key alone: nothing that `put` returns has to reach the receiver.
    2. A message put is got at most once by receivers that live; one that dies while it holds a message gives it back.
    3. What was put is never lost in silence: it is got, discarded by its sender, or expires and is counted.
    4. The same key on another edge is another message. A second `put` of a key that was not got yet replaces the first.
    5. `put` and `get` may be called from several threads.
    """

    name: str

    @abstractmethod
    def put(self, message: Message, deadline: float | None = None) -> int:
        """Send; returns the bytes that the path holds for it.

        Args:
            deadline: until when to wait for room, on `clock.monotonic_seconds`; None does not wait.

        Raises:
            NoRoomError: the path is full.
            ReceiverBehindError: the receiver of the edge has to get something first.
            MessageTooLargeError: it will never fit.
            RendezvousError: what processes meet at does not answer, or cannot be used: a master, a directory.
            PayloadError: something in it cannot be written.
            PathClosedError: after `close`.
        """

    @abstractmethod
    def get(self, edge: Edge, key: str) -> Arrival | None:
        """The message, or None when there is none yet, or none that was there when the path last looked.

        Its tensors may be views of the path's memory, which stays theirs until none of them is there any more.

        Raises:
            CorruptMessageError: it is not what was put; it is dropped.
            RendezvousError: nothing can be looked for.
            PathClosedError: after `close`.
        """

    def holds(self, edge: Edge, key: str) -> bool:
        """Whether what this process has put there waits, not got by anybody; True where a path cannot tell."""
        return True

    def lease(self, edge: Edge, key: str) -> Lease | None:
        """What this process has put there and nobody has got; its buffers are valid until the lease ends.

        Unless a path has something better: it is got, and giving it back puts it again.

        Raises:
            CorruptMessageError: it is not what was put; it is dropped.
            PathClosedError: after `close`.
        """
        arrival = self.get(edge, key)
        if arrival is None:
            return None
        from vllm_omni_sched.connectors.framing import message_of  # which needs this module

        return Lease(arrival, lambda: None, lambda: self.put(message_of(arrival, edge, key)) > 0)

    def withdraw(self, edge: Edge, key: str) -> bool:
        """Take back what this process has put there, as `discard` on one edge; False when it was got, or is not there.

        Paths that can do it without reading the message have something better.

        Raises:
            RendezvousError: it could not be taken back, and may be there still.
            PathClosedError: after `close`.
        """
        lease = self.lease(edge, key)
        if lease is not None:
            lease.consume()
        return lease is not None

    @abstractmethod
    def discard(self, key: str) -> int:
        """Take back what this process has put under ``key``, on any edge; how many messages. Those got stay valid."""

    @abstractmethod
    def reap(self, limit: int | None = None) -> int:
        """Look at ``limit`` messages in flight (None: all) and take back the room of those done with; how many."""

    def carrier(self) -> str:
        """Name of the path that has carried what this thread has put or got last, where this one is made of several."""
        return self.name

    def traffic(self) -> Mapping[tuple[str, Edge], Traffic]:
        """What this process has put, by path and edge; empty where a path cannot tell."""
        return {}

    @abstractmethod
    def health(self) -> Health:
        """True to what happens."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Twice is fine. Messages on their way stay for receivers that live."""
