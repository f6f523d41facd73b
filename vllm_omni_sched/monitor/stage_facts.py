"""What `StageBoard` holds of a replica, a stage, an edge and a modality. Names on ``/metrics``: `stage_metrics`."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from vllm_omni_sched.monitor.counts import REQUEST_BUCKETS, Histogram

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TRANSFER_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Outcome(str, Enum):
    """How a request left a replica."""

    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"  # its user gave up, or it was submitted again
    LOST = "lost"  # the replica died under it


class Lookup(str, Enum):
    """Whether a request went to a replica that had data of it."""

    HIT = "hit"
    MISS = "miss"


class Side(str, Enum):
    """Where a connector has a message in hand."""

    PUT = "put"
    GET = "get"


@dataclass(frozen=True)
class Quantiles:
    """Exact quantiles (nearest rank) of the last observations; None while there is none."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quantiles":
        """Quantiles of these values, in any order."""
        ordered = sorted(values)
        n = len(ordered)
        if not n:
            return cls(0)
        # The product is rounded first: 0.9 * 10 must not be above 9.
        ranks = (math.ceil(round(n * q, 9)) - 1 for q in (0.5, 0.9, 0.99))
        return cls(n, *(ordered[rank] for rank in ranks))


class Sliding:
    """Observations as a histogram since the start, and the last ones as they are."""

    __slots__ = ("histogram", "recent")

    def __init__(self, bounds: tuple[float, ...], window: int) -> None:
        self.histogram = Histogram(bounds)
        self.recent: deque[float] = deque(maxlen=window)

    def observe(self, value: float) -> None:
        """Add one observation."""
        self.histogram.observe(value)
        self.recent.append(value)

    @property
    def quantiles(self) -> Quantiles:
        """Of the last observations."""
        return Quantiles.of(list(self.recent))


@dataclass(slots=True)
class Times:
    """When a request came to a replica, and when it began to run there."""

    submitted: float
    started: float | None = None


def _ended() -> dict[str, int]:
    return {outcome.value: 0 for outcome in Outcome}


def _lookups() -> dict[str, int]:
    return {result.value: 0 for result in Lookup}


@dataclass(slots=True, eq=False)
class ReplicaFacts:
    """Of one replica of a stage."""

    latency_seconds: Sliding
    queue_seconds: Sliding
    batch_size: Sliding
    requests: dict[str, Times] = field(default_factory=dict)
    running: int = 0
    ended: dict[str, int] = field(default_factory=_ended)
    lookups: dict[str, int] = field(default_factory=_lookups)
    prefix_tokens: dict[str, int] = field(default_factory=dict)  # by `Lookup`; empty: not known
    encoder_items: dict[str, int] = field(default_factory=dict)
    batch_limit: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    restarts: int = 0
    redispatched: int = 0
    incidents: dict[str, int] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Requests that have come and not begun to run."""
        return len(self.requests) - self.running

    @classmethod
    def with_window(cls, window: int, incidents: Iterable[str]) -> "ReplicaFacts":
        """Facts that keep so many last observations."""
        return cls(
            Sliding(LATENCY_BUCKETS, window),
            Sliding(LATENCY_BUCKETS, window),
            Sliding(tuple(map(float, REQUEST_BUCKETS)), window),
            incidents=dict.fromkeys(incidents, 0),
        )


@dataclass(slots=True, eq=False)
class StageFacts:
    """Of all replicas of a stage."""

    merged: int = 0
    credits_free: int | None = None
    anomalies: dict[str, int] = field(default_factory=dict)


def _sides() -> dict[str, float]:
    return {side.value: 0.0 for side in Side}


@dataclass(slots=True, eq=False)
class EdgeFacts:
    """From one stage to another; `recent`: bytes and seconds that connectors told last."""

    transfer_seconds: Sliding
    recent: deque[tuple[int, float]]
    messages: int = 0
    nbytes: int = 0
    connector_seconds: dict[str, float] = field(default_factory=_sides)


@dataclass(slots=True, eq=False)
class LoadFacts:
    """Of one modality: requests per second."""

    observed: float | None = None
    forecast: float | None = None
