"""What routing has learnt of its paths: what each costs on each edge, whether it is well, what it has carried."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_sched.connectors.base import Edge
from vllm_omni_sched.connectors.routing.cost import LARGE, SMALL, Illness, TransferCost
from vllm_omni_sched.connectors.routing.options import RoutingOptions
from vllm_omni_sched.connectors.routing.report import REPORT_EVERY, Report
from vllm_omni_sched.connectors.routing.route import PathState, RouteReason
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


@dataclass
class _Flow:
    """What is known of one path on one edge."""

    put: TransferCost = field(default_factory=TransferCost)
    got: TransferCost = field(default_factory=TransferCost)  # by this process, or as its receivers say
    unused: int = 0  # messages that went by others since it was used
    count: int = 0  # messages put or got
    small: tuple[int, float] | None = None  # the last one got, to be reported
    large: tuple[int, float] | None = None


class Learnt:
    """Of every path; any thread may tell and ask. No path is at work in here.

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
        """Of paths for a message; ``here``: those within this host reach its receiver."""
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
        """Of long messages where they arrive; None when not known."""
        with self._lock:
            return self._flow(edge, name).got.bytes_per_second

    def took(self, edge: Edge, name: str, nbytes: int, reason: RouteReason, seconds: float, of: Sequence[str]) -> bool:
        """A path took a message, one of those that might have; whether it is time to read what receivers report."""
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
        """A path did not take a message."""
        with self._lock:
            if self._illness[name].well:
                logger.warning("path %s refused a message: %s", name, error)
            self._illness[name].refused(now)
            self.fell_back[name] += 1

    def got(self, edge: Edge, name: str, nbytes: int, seconds: float) -> Report | None:
        """A message was got; what senders should be told now."""
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
        """What a receiver has reported."""
        with self._lock:
            for one in filter(None, (report.small, report.large)):
                self._flow(edge, name).got.observe(*one)

    def edges(self) -> set[Edge]:
        """Those that messages were put on; not those with nothing but reports."""
        with self._lock:
            return {edge for edge, _ in self.served_bytes}

    def sick(self) -> list[str]:
        with self._lock:
            return [name for name, illness in self._illness.items() if not illness.well]

    def facts(self) -> dict[str, Any]:
        """Numbers for `Health.facts`."""
        with self._lock:
            return {
                "served": {f"{edge} {name} {why.value}": n for (edge, name, why), n in sorted(self.served.items())},
                "served_bytes": {f"{edge} {name}": n for (edge, name), n in sorted(self.served_bytes.items())},
                "fell_back": dict(self.fell_back),
            }

    def _flow(self, edge: Edge, name: str) -> _Flow:
        return self._flows.setdefault((edge, name), _Flow())
