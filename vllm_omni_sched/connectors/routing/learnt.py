"""Measurements of routing: costs of each transport on each edge, health of transports, and reports of receivers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message, make_message
from vllm_omni_sched.connectors.routing.options import RoutingOptions
from vllm_omni_sched.connectors.routing.route import (
    LARGE,
    SMALL,
    RetrySchedule,
    RouteReason,
    TransferCost,
    TransportState,
)
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


REPORT_EVERY = 32  # messages of an edge and transport
KEY = "omni-sched/report/"


def is_due(count: int, early: bool) -> bool:
    """Return whether receivers report, and senders look for reports, after so many messages.

    ``early``: also after the first, the second, the fourth and so on.
    """
    return count % REPORT_EVERY == 0 or (early and count < REPORT_EVERY and count & (count - 1) == 0)


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
class _Flow:
    """Measurements of one transport on one edge."""

    put: TransferCost = field(default_factory=TransferCost)
    got: TransferCost = field(default_factory=TransferCost)  # by this process, or as reported by receivers
    unused: int = 0  # messages that other transports carried since it was used
    count: int = 0  # messages put or got
    small: tuple[int, float] | None = None  # the last received one, to be reported
    large: tuple[int, float] | None = None


class Learnt:
    """Measurements of every transport; thread-safe, and calls no transport.

    Args:
        distances: distances of transports, by name.
        compresses: whether messages to other hosts may be compressed, for which senders have to know the link's speed.
    """

    def __init__(self, distances: dict[str, int], options: RoutingOptions, compresses: bool = False) -> None:
        self._distances, self._options = distances, options
        self._early = {name for name, distance in distances.items() if compresses and distance}
        self._tells = len(distances) > 1 or bool(self._early)
        self._retries = {
            name: RetrySchedule(options.first_retry_seconds, options.longest_retry_seconds) for name in distances
        }
        self._flows: dict[tuple[Edge, str], _Flow] = {}
        self._lock = threading.Lock()
        self.served: Counter[tuple[Edge, str, RouteReason]] = Counter()
        self.served_bytes: Counter[tuple[Edge, str]] = Counter()
        self.fell_back: Counter[str] = Counter()

    def states(self, edge: Edge, nbytes: int, names: Sequence[str], here: bool, now: float) -> list[TransportState]:
        """Return the states of transports for a message.

        Args:
            here: whether transports within this host reach the receiver.
        """
        with self._lock:
            states = []
            for name in names:
                flow, retries = self._flow(edge, name), self._retries[name]
                put, got = flow.put.seconds(nbytes), flow.got.seconds(nbytes)
                seconds = None if put is None else put + (got or 0.0)
                trial = retries.is_due(now) or (retries.well and flow.unused >= self._options.trial_every)
                distance = self._distances[name]
                states.append(TransportState(name, distance, here or distance > 0, retries.well, trial, seconds))
        return states

    def bytes_per_second(self, edge: Edge, name: str) -> float | None:
        """Return the receivers' throughput for long messages; None if unknown."""
        with self._lock:
            return self._flow(edge, name).got.bytes_per_second

    def took(self, edge: Edge, name: str, nbytes: int, reason: RouteReason, seconds: float, of: Sequence[str]) -> bool:
        """Record that a transport took a message; return whether it is time to read receivers' reports."""
        with self._lock:
            if not self._retries[name].well:
                logger.warning("transport %s takes messages again", name)
            self._retries[name].took()
            for other in of:
                self._flow(edge, other).unused += 1
            flow = self._flow(edge, name)
            flow.unused = 0
            flow.put.observe(nbytes, seconds)
            self.served[edge, name, reason] += 1
            self.served_bytes[edge, name] += nbytes
            flow.count += 1
            return self._tells and is_due(flow.count, name in self._early)

    def refused(self, name: str, error: Exception, now: float) -> None:
        """Record that a transport refused a message."""
        with self._lock:
            if self._retries[name].well:
                logger.warning("transport %s refused a message: %s", name, error)
            self._retries[name].refused(now)
            self.fell_back[name] += 1

    def got(self, edge: Edge, name: str, nbytes: int, seconds: float) -> Report | None:
        """Record a received message; return the report to send to its senders now, if any."""
        with self._lock:
            flow = self._flow(edge, name)
            flow.got.observe(nbytes, seconds)
            if nbytes <= SMALL:
                flow.small = nbytes, seconds
            elif nbytes >= LARGE:
                flow.large = nbytes, seconds
            flow.count += 1
            return Report(flow.small, flow.large) if self._tells and is_due(flow.count, name in self._early) else None

    def told(self, edge: Edge, name: str, report: Report) -> None:
        """Record the measurements of a receiver's report."""
        with self._lock:
            for one in filter(None, (report.small, report.large)):
                self._flow(edge, name).got.observe(*one)

    def edges(self) -> set[Edge]:
        """Return the edges on which messages were put, without those that only have reports."""
        with self._lock:
            return {edge for edge, _ in self.served_bytes}

    def sick(self) -> list[str]:
        with self._lock:
            return [name for name, retries in self._retries.items() if not retries.well]

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        with self._lock:
            return {
                "served": {f"{edge} {name} {why.value}": n for (edge, name, why), n in sorted(self.served.items())},
                "served_bytes": {f"{edge} {name}": n for (edge, name), n in sorted(self.served_bytes.items())},
                "fell_back": dict(self.fell_back),
            }

    def _flow(self, edge: Edge, name: str) -> _Flow:
        return self._flows.setdefault((edge, name), _Flow())
