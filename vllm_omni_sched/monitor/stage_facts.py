"""Define the data that `StageBoard` holds of replicas, stages, edges and modalities; names: `stage_metrics`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from vllm_omni_sched.monitor.counts import REQUEST_BUCKETS, Histogram

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TRANSFER_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Outcome(str, Enum):
    """Way in which a request left a replica."""

    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"  # its client gave up, or it was submitted again
    LOST = "lost"  # the replica died while it had the request


class Lookup(str, Enum):
    """Result of routing: whether a request went to a replica that had its data."""

    HIT = "hit"
    MISS = "miss"


class Side(str, Enum):
    """Side of a connector."""

    PUT = "put"
    GET = "get"


@dataclass(slots=True)
class Times:
    """Times at which a request came to a replica and began to run there."""

    submitted: float
    started: float | None = None


def _ended() -> dict[str, int]:
    return {outcome.value: 0 for outcome in Outcome}


def _lookups() -> dict[str, int]:
    return {result.value: 0 for result in Lookup}


@dataclass(slots=True, eq=False)
class ReplicaFacts:
    """Counts and times of one replica of a stage."""

    latency_seconds: Histogram
    queue_seconds: Histogram
    batch_size: Histogram
    requests: dict[str, Times] = field(default_factory=dict)
    running: int = 0
    ended: dict[str, int] = field(default_factory=_ended)
    lookups: dict[str, int] = field(default_factory=_lookups)
    prefix_tokens: dict[str, int] = field(default_factory=dict)  # by `Lookup`; empty: unknown
    encoder_items: dict[str, int] = field(default_factory=dict)
    batch_limit: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    restarts: int = 0
    redispatched: int = 0
    incidents: dict[str, int] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Return the requests that have come and not begun to run."""
        return len(self.requests) - self.running

    @classmethod
    def empty(cls, incidents: Iterable[str]) -> "ReplicaFacts":
        """Return the facts of a replica about which nothing is known yet."""
        return cls(
            Histogram(LATENCY_BUCKETS),
            Histogram(LATENCY_BUCKETS),
            Histogram(tuple(map(float, REQUEST_BUCKETS))),
            incidents=dict.fromkeys(incidents, 0),
        )


@dataclass(slots=True, eq=False)
class StageFacts:
    """Counts of all replicas of a stage."""

    merged: int = 0
    credits_free: int | None = None
    anomalies: dict[str, int] = field(default_factory=dict)
    given_up: dict[str, int] = field(default_factory=dict)  # requests, by reason


def _sides() -> dict[str, float]:
    return {side.value: 0.0 for side in Side}


@dataclass(slots=True, eq=False)
class EdgeFacts:
    """Counts and times of transfers from one stage to another."""

    transfer_seconds: Histogram
    messages: int = 0
    nbytes: int = 0
    connector_seconds: dict[str, float] = field(default_factory=_sides)


@dataclass(slots=True, eq=False)
class LoadFacts:
    """Requests per second of one modality."""

    observed: float | None = None
    forecast: float | None = None
