"""Speeds of the links to other hosts, which receivers measure and report to senders: compression needs them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import msgspec

from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message, make_message
from vllm_omni_sched.resource.rate import Rate

REPORT_EVERY = 32
"""Messages of an edge after which a receiver reports; the first, the second, the fourth and so on are reported, too."""
KEY = "omni-sched/report/"


SMALL, LARGE = 16 << 10, 256 << 10
"""Sizes in bytes: below the first, the fixed cost dominates; above the second, the cost per byte."""


class TransferCost:
    """Time of a message as a fixed part and a part per byte, in seconds, for one transport and edge."""

    def __init__(self) -> None:
        self._fixed = Rate(0.0)
        self._per_byte = Rate(0.0)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Record the time of a message."""
        if nbytes <= SMALL:
            self._fixed.observe(1, seconds)
        elif nbytes >= LARGE:
            self._per_byte.observe(nbytes, max(0.0, seconds - self._fixed.per_unit))

    @property
    def bytes_per_second(self) -> float | None:
        """Return the throughput of long messages; None without measurements."""
        return 1 / self._per_byte.per_unit if self._per_byte.is_measured and self._per_byte.per_unit > 0 else None


class Report(msgspec.Struct):
    """The last received small and large message: bytes and seconds of the receiver's side."""

    small: tuple[int, float] | None
    large: tuple[int, float] | None


def report_message(edge: Edge, transport: str, report: Report) -> Message:
    """Return a report to the senders of ``edge``; a newer report replaces an unread one."""
    return make_message(Edge(edge.target, edge.source), KEY + transport, report)


def read_report(arrival: Arrival) -> Report:
    """Return the report in a message.

    Raises:
        CorruptMessageError: the message is not a report.
    """
    try:
        return msgspec.convert(arrival.open(), Report)
    except msgspec.ValidationError as error:
        raise CorruptMessageError(f"a report of a receiver cannot be read: {error}") from error


@dataclass
class _Link:
    """Messages of one edge by one transport."""

    got: TransferCost = field(default_factory=TransferCost)
    count: int = 0  # messages put or got
    small: tuple[int, float] | None = None
    large: tuple[int, float] | None = None

    def is_due(self) -> bool:
        """Count a message; return whether it is time to report, or to read a report."""
        self.count += 1
        return self.count % REPORT_EVERY == 0 or (self.count < REPORT_EVERY and self.count & (self.count - 1) == 0)


class LinkSpeeds:
    """The speed of each edge by each transport between hosts; thread-safe, and calls no transport."""

    def __init__(self) -> None:
        self._links: dict[tuple[Edge, str], _Link] = {}
        self._lock = threading.Lock()

    def bytes_per_second(self, edge: Edge, name: str) -> float | None:
        """Return the receivers' throughput for long messages; None if unknown."""
        with self._lock:
            return self._link(edge, name).got.bytes_per_second

    def put(self, edge: Edge, name: str) -> bool:
        """Count a sent message; return whether it is time to read the report of its receivers."""
        with self._lock:
            return self._link(edge, name).is_due()

    def got(self, edge: Edge, name: str, nbytes: int, seconds: float) -> Report | None:
        """Record a received message; return the report to send to its senders now, if any."""
        with self._lock:
            link = self._link(edge, name)
            link.got.observe(nbytes, seconds)
            if nbytes <= SMALL:
                link.small = nbytes, seconds
            elif nbytes >= LARGE:
                link.large = nbytes, seconds
            return Report(link.small, link.large) if link.is_due() else None

    def observe(self, edge: Edge, name: str, report: Report) -> None:
        """Record the measurements of a receiver's report."""
        with self._lock:
            for one in filter(None, (report.small, report.large)):
                self._link(edge, name).got.observe(*one)

    def _link(self, edge: Edge, name: str) -> _Link:
        return self._links.setdefault((edge, name), _Link())
