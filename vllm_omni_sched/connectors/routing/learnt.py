"""Measurements of routing: cost of each path on each edge, health of paths, and what receivers report."""

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
from vllm_omni_sched.connectors.routing.route import LARGE, SMALL, Illness, PathState, RouteReason, TransferCost
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


REPORT_EVERY = 32  # messages of an edge and path
KEY = "omni-sched/report/"


class Report(msgspec.Struct):
    """The last received small and large message: bytes and seconds of the receiver's side."""

    small: tuple[int, float] | None
    large: tuple[int, float] | None


def report_message(edge: Edge, path: str, report: Report) -> Message:
    """Return a report to the senders of ``edge``; a newer report replaces an unread one."""
    return make_message(Edge(edge.target, edge.source), KEY + path, report)


def read_report(arrival: Arrival) -> Report:
    """Return the report in a message.

    Raises:
        CorruptMessageError: it is no report.
    """
    try:
        return msgspec.convert(arrival.open(), Report)
    except msgspec.ValidationError as error:
        raise CorruptMessageError(f"a report of a receiver cannot be read: {error}") from error


@dataclass
class _Flow:
    """Measurements of one path on one edge."""

    put: TransferCost = field(default_factory=TransferCost)
    got: TransferCost = field(default_factory=TransferCost)  # by this process, or as its receivers say
    unused: int = 0  # messages that went by others since it was used
    count: int = 0  # messages put or got
    small: tuple[int, float] | None = None  # the last one got, to be reported
    large: tuple[int, float] | None = None


class Learnt:
    """Measurements of every path; thread-safe, and calls no path.

    Args:
        distances: of paths, by name.
    """

    def __init__(self, distances: dict[str, int], options: RoutingOptions) -> None:
        self._distances, self._options = distances, options
        self._illness = {
            name: Illness(options.first_retry_seconds, options.longest_retry_seconds) for name in distances
        }
        self._flows: dict[tuple[Edge, str], _Flow] = {}
        self._lock = threading.Lock()
        self.served: Counter[tuple[Edge, str, RouteReason]] = Counter()
        self.served_bytes: Counter[tuple[Edge, str]] = Counter()
        self.fell_back: Counter[str] = Counter()

    def states(self, edge: Edge, nbytes: int, names: Sequence[str], here: bool, now: float) -> list[PathState]:
        """Return the states of paths for a message; ``here``: paths within this host reach its receiver."""
        with self._lock:
            states = []
            for name in names:
                flow, illness = self._flow(edge, name), self._illness[name]
                put, got = flow.put.seconds(nbytes), flow.got.seconds(nbytes)
                seconds = None if put is None else put + (got or 0.0)
                trial = illness.is_due(now) or (illness.well and flow.unused >= self._options.trial_every)
                distance = self._distances[name]
                states.append(PathState(name, distance, here or distance > 0, illness.well, trial, seconds))
        return states

    def bytes_per_second(self, edge: Edge, name: str) -> float | None:
        """Return the receivers' throughput for long messages; None if unknown."""
        with self._lock:
            return self._flow(edge, name).got.bytes_per_second

    def took(self, edge: Edge, name: str, nbytes: int, reason: RouteReason, seconds: float, of: Sequence[str]) -> bool:
        """Record that a path took a message; return whether it is time to read receivers' reports."""
        with self._lock:
            if not self._illness[name].well:
                logger.warning("path %s takes messages again", name)
            self._illness[name].took()
            for other in of:
                self._flow(edge, other).unused += 1
            flow = self._flow(edge, name)
            flow.unused = 0
            flow.put.observe(nbytes, seconds)
            self.served[edge, name, reason] += 1
            self.served_bytes[edge, name] += nbytes
            flow.count += 1
            return flow.count % REPORT_EVERY == 0 and len(self._distances) > 1

    def refused(self, name: str, error: Exception, now: float) -> None:
        """Record that a path refused a message."""
        with self._lock:
            if self._illness[name].well:
                logger.warning("path %s refused a message: %s", name, error)
            self._illness[name].refused(now)
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
            due = flow.count % REPORT_EVERY == 0 and len(self._distances) > 1
            return Report(flow.small, flow.large) if due else None

    def told(self, edge: Edge, name: str, report: Report) -> None:
        """Take over a receiver's report."""
        with self._lock:
            for one in filter(None, (report.small, report.large)):
                self._flow(edge, name).got.observe(*one)

    def edges(self) -> set[Edge]:
        """Return the edges on which messages were put, without those that only have reports."""
        with self._lock:
            return {edge for edge, _ in self.served_bytes}

    def sick(self) -> list[str]:
        with self._lock:
            return [name for name, illness in self._illness.items() if not illness.well]

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
