"""Base class of transports: put, get, withdraw, close, fork, health and back-pressure, the same in every medium."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import (
    ConnectorError,
    MessageTooLargeError,
    ReceiverBehindError,
    TransportClosedError,
)
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.lifetime import Lifetimes
from vllm_omni_sched.connectors.transport import Health, Status, Traffic, Transport

RECENT_SECONDS = 60.0
"""Seconds for which `health` reports a loss."""


class RecentLosses:
    """Monotonic counts, and the time when one of them was last observed to grow.

    Args:
        names: names of the counts.
    """

    def __init__(self, names: Sequence[str], clock: Clock) -> None:
        self._names, self._clock = names, clock
        self._seen: dict[str, int] = {}
        self._at = 0.0

    def recent(self, facts: Mapping[str, Any]) -> list[str]:
        """Return all counts above 0, if one of them has grown within `RECENT_SECONDS`."""
        losses, now = {name: facts[name] for name in self._names if facts.get(name)}, self._clock()
        if losses != self._seen:
            self._seen, self._at = losses, now
        return [f"{count} {name}" for name, count in losses.items()] if now - self._at <= RECENT_SECONDS else []


@dataclass
class MessageCounts:
    """Counts of the outcomes of a sender's messages; each medium adds more."""

    put: int = 0
    put_bytes: int = 0
    consumed: int = 0
    replaced: int = 0
    discarded: int = 0
    expired: int = 0
    refused: int = 0

    def facts(self) -> dict[str, int]:
        """Return the counts for `Health.facts`."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


@dataclass
class EdgeCounts(MessageCounts):
    """Counts with the messages and bytes of each edge that are not known to be received, which credit limits."""

    waiting: Counter[Edge] = field(default_factory=Counter)
    waiting_bytes: Counter[Edge] = field(default_factory=Counter)


class Credit(Protocol):
    """Options that limit what an edge's receiver has not received yet; None: no limit."""

    @property
    def max_inflight(self) -> int | None: ...

    @property
    def window_size(self) -> int | None: ...


class Refusal(NamedTuple):
    """Reason why a medium does not take a message.

    Attributes:
        error: what `put` raises after its deadline; `MessageTooLargeError` at once.
        why: the message of that error.
        until: returns a number that changes as soon as another attempt may succeed; default: `progress`.
    """

    error: type[ConnectorError]
    why: str
    until: Callable[[], int] | None = None


class _StandingRefusal(NamedTuple):
    """Reason why the last put of an edge failed. The transport is sick until the number changes."""

    why: str
    until: Callable[[], int]
    number: int


_lifetimes = Lifetimes()


class MediumTransport(Transport):
    """Transport of messages through one medium: the medium moves bytes, this class does everything else.

    1. `put` tries until the medium takes the message or the deadline has passed, with growing pauses. A message that
       can never fit is refused at once. A refused message is counted.
    2. Back-pressure: an edge with ``max_inflight`` messages or ``window_size`` bytes that were not received refuses
       more (`ReceiverBehindError`); one message is always allowed.
    3. After a refusal the transport is sick until the medium has made progress or takes a message of the edge. It is
       degraded for a while after each loss.
    4. A closed transport raises `TransportClosedError` in `put` and `get`, and does nothing otherwise. All
       transports of a process are closed when it ends; in a forked child they are closed, and release what they
       inherited without acting on it, because it belongs to the parent.

    A medium implements the methods that begin with an underscore. They are called while the transport is open, and with
    `_send_lock` or `_receive_lock`, for media that set one.

    Attributes:
        counts: the sender's counts.
    """

    title: ClassVar[str]
    """Name of the transport in errors, such as "the arena"."""
    lost: ClassVar[tuple[str, ...]]
    """Names of the facts that count losses."""
    first_wait: ClassVar[float]
    longest_wait: ClassVar[float]
    """Shortest and longest pause between two attempts to put, in seconds; doubled each time."""

    def __init__(self, clock: Clock, sleep: Callable[[float], None], credit: Credit | None = None) -> None:
        self._clock, self._sleep = clock, sleep
        self._credit = credit if credit is not None and (credit.max_inflight or credit.window_size) else None
        self._closed = ""  # what closed it, for errors
        self._refusals: dict[Edge, _StandingRefusal] = {}
        self._losses = RecentLosses(self.lost, clock)
        self._make_locks()

    def _opened(self) -> None:
        """Guard this transport against forks, and close it when the process ends; the last act of constructors."""
        _lifetimes.add(self)

    # the life of a message

    def put(self, message: Message, deadline: float | None = None) -> int:
        held_bytes = self.put_unless(message, deadline, None)
        assert held_bytes is not None
        return held_bytes

    def put_unless(self, message: Message, deadline: float | None, unless: Callable[[], bool] | None) -> int | None:
        """Send as `put`; return None, without sending or counting, if ``unless`` becomes true while waiting."""
        wait = self.first_wait
        while True:
            with self._send_lock:
                if self._closed:
                    self._check_open("put")
                outcome = self._send(message)
                if not isinstance(outcome, Refusal):
                    if self._refusals:
                        self._refusals.pop(message.edge, None)
                    return outcome
                never = issubclass(outcome.error, MessageTooLargeError)
                if never or deadline is None or self._clock() >= deadline:
                    self.counts.refused += 1
                    if not never:
                        until = outcome.until or self.progress
                        self._refusals[message.edge] = _StandingRefusal(outcome.why, until, until())
                    raise outcome.error(outcome.why)
            if unless is not None and unless():
                return None
            self._sleep(wait)
            wait = min(2 * wait, self.longest_wait)

    def get(self, edge: Edge, key: str) -> Arrival | None:
        with self._receive_lock:
            if self._closed:
                self._check_open("get")
            return self._receive(edge, key)

    def withdraw(self, edge: Edge, key: str) -> bool:
        with self._send_lock:
            return not self._closed and self._withdraw(edge, key)

    def discard(self, key: str) -> int:
        with self._send_lock:
            return 0 if self._closed else self._discard(key)

    def reap(self, limit: int | None = None) -> int:
        with self._send_lock:
            return 0 if self._closed else self._reap(limit)

    def traffic(self) -> dict[tuple[str, Edge], Traffic]:
        with self._send_lock:
            found = {} if self._closed else self._traffic()
        return {(self.name, edge): traffic for edge, traffic in found.items()}

    # its state

    def health(self) -> Health:
        with self._send_lock, self._receive_lock:
            if not self._closed:
                self._look_after()
            facts = self._facts()
            if self._closed:
                return Health(Status.CLOSED, f"{self.title} was closed {self._closed}", facts)
            standing = list(self._refusals.values())
            if sick := self._trouble() or "; ".join(one.why for one in standing if one.until() == one.number):
                return Health(Status.SICK, sick, facts)
            problems = [*self._losses.recent(facts), *self._warnings(facts)]
        return Health(Status.DEGRADED if problems else Status.HEALTHY, ", ".join(problems), facts)

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._before_close()
            with self._send_lock, self._receive_lock:
                self._closed = "by its process"
                self._close()

    def abandon(self) -> None:
        """Release what a forked child has inherited: it belongs to the parent, and its locks may be held forever."""
        self._make_locks()
        if not self._closed:
            self._closed = "by a fork, for the child,"
            self._abandon()

    def _make_locks(self) -> None:
        self._send_lock: AbstractContextManager[object] = nullcontext()
        self._receive_lock: AbstractContextManager[object] = nullcontext()
        self._close_lock = threading.RLock()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise TransportClosedError(f"{self.title} was closed {self._closed} before this {what}")

    def _behind(self, edge: Edge, nbytes: int) -> Refusal | None:
        """Return a refusal if an edge's receiver must receive before more is sent."""
        credit = self._credit
        if credit is None:
            return None
        messages, window = credit.max_inflight, credit.window_size
        for _ in range(2):
            waiting, waiting_bytes = self.credited()
            over = messages is not None and waiting[edge] >= messages
            over = over or (window is not None and waiting_bytes[edge] + nbytes > window)
            if not over or not waiting[edge]:
                return None
            before = self.progress()
            self._reap(None)
            if self.progress() == before:
                break
        if not waiting[edge]:
            return None
        held = f"{waiting[edge]} messages ({waiting_bytes[edge]} bytes)"
        why = f"edge {edge} has {held} not received yet (limits `max_inflight`, `window_size`)"
        return Refusal(ReceiverBehindError, why)

    # methods that a medium implements

    @property
    @abstractmethod
    def counts(self) -> MessageCounts:
        """Return the sender's counts."""

    @abstractmethod
    def progress(self) -> int:
        """Return a number that changes when messages were received or removed: there may be room again."""

    def credited(self) -> tuple[Mapping[Edge, int], Mapping[Edge, int]]:
        """Return messages and bytes by edge that are not known to be received; for media with credit."""
        return {}, {}

    @abstractmethod
    def _send(self, message: Message) -> int | Refusal:
        """Send a message now; return the bytes that the medium holds for it, or why it does not take it."""

    @abstractmethod
    def _receive(self, edge: Edge, key: str) -> Arrival | None:
        """Return the message; None if the medium has none of that name yet."""

    @abstractmethod
    def _withdraw(self, edge: Edge, key: str) -> bool:
        """See `Transport.withdraw`."""

    @abstractmethod
    def _discard(self, key: str) -> int:
        """See `Transport.discard`."""

    @abstractmethod
    def _reap(self, limit: int | None) -> int:
        """See `Transport.reap`."""

    def _traffic(self) -> Mapping[Edge, Traffic]:
        """Return the sender's messages by edge; none if the medium cannot tell."""
        return {}

    def _look_after(self) -> None:
        """Do periodic work; called before each health report."""
        self._reap(None)

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`, also of a closed transport."""

    def _trouble(self) -> str:
        """Return why the medium takes no messages now, "" if it takes them."""
        return ""

    def _warnings(self, facts: Mapping[str, Any]) -> list[str]:
        """Return what degrades the transport besides losses."""
        return []

    def _before_close(self) -> None:
        """Prepare for closing, while the transport is still open."""

    @abstractmethod
    def _close(self) -> None:
        """Release all resources; messages in flight stay for receivers that live."""

    @abstractmethod
    def _abandon(self) -> None:
        """Release what a forked child has inherited, without acting on it."""
