"""Collect the counts and times of replicas, stages, edges and modalities: an adapter feeds it, ``/metrics`` reads it.

Pure: the time is an argument. One thread writes; any thread may read. Memory is bounded by the graph and by
`max_in_flight` requests of a replica, of which the oldest are forgotten. `stage_metrics` has the names
of the metrics.
"""

import math
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
    """States the result of routing: whether a request went to a replica that had its data."""

    HIT = "hit"
    MISS = "miss"


class Side(str, Enum):
    """Side of a connector."""

    PUT = "put"
    GET = "get"


def _by_value(kind: type[Enum]) -> dict[str, int]:
    return {one.value: 0 for one in kind}


@dataclass(slots=True)
class Times:
    """Times at which a request came to a replica and began to run there."""

    submitted: float
    started: float | None = None


@dataclass(slots=True, eq=False)
class ReplicaFacts:
    """Counts and times of one replica of a stage."""

    latency_seconds: Histogram
    queue_seconds: Histogram
    batch_size: Histogram
    requests: dict[str, Times] = field(default_factory=dict)
    running: int = 0
    ended: dict[str, int] = field(default_factory=lambda: _by_value(Outcome))
    lookups: dict[str, int] = field(default_factory=lambda: _by_value(Lookup))
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


@dataclass(slots=True, eq=False)
class EdgeFacts:
    """Counts and times of transfers from one stage to another."""

    transfer_seconds: Histogram
    messages: int = 0
    nbytes: int = 0
    connector_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((side.value for side in Side), 0.0)
    )


@dataclass(slots=True, eq=False)
class LoadFacts:
    """Requests per second of one modality."""

    observed: float | None = None
    forecast: float | None = None


MAX_REPLICAS = 1024
"""Most replicas of a stage, which bounds the values of a label."""


class StageBoard:
    """Counts and times of each stage and replica.

    Args:
        stages: ids of the graph's stages.
        anomalies, incidents, reasons: the kinds that `anomaly`, `incident` and `given_up` accept, used as labels of
            metrics: the values of the enums of the detectors and of the recovery.
        modalities: those that `load` accepts.
        max_in_flight: most requests of a replica whose times are kept.

    Raises:
        ValueError: there is no stage, or a bound is below 1. Methods raise it if a stage, replica, kind or modality is
            unknown, or a number is negative or not finite.
    """

    def __init__(
        self,
        stages: Iterable[int],
        *,
        anomalies: Iterable[str] = (),
        incidents: Iterable[str] = (),
        reasons: Iterable[str] = (),
        max_in_flight: int = 65536,
    ) -> None:
        kinds, whys = tuple(anomalies), tuple(reasons)
        self.stages = {
            stage: StageFacts(anomalies=dict.fromkeys(kinds, 0), given_up=dict.fromkeys(whys, 0))
            for stage in sorted(stages)
        }
        if not self.stages or max_in_flight < 1:
            given = f"{len(self.stages)} and {max_in_flight}"
            raise ValueError(f"the number of stages and max_in_flight must be 1 or more, got {given}")
        self.replicas: dict[tuple[int, int], ReplicaFacts] = {}
        self.edges: dict[tuple[int, int], EdgeFacts] = {}
        self.loads = {modality: LoadFacts() for modality in ("text", "image", "audio", "video")}
        self.forgotten = 0  # requests that did not end before `max_in_flight` others came
        self._incidents = tuple(incidents)
        self._max_in_flight = max_in_flight

    def submitted(self, stage: int, replica: int, request_id: str, now: float) -> None:
        """Record that a request was sent to a replica; if it was there already, its earlier run counts as aborted."""
        facts = self._replica(stage, replica)
        self._end(facts, request_id, Outcome.ABORTED)
        if len(facts.requests) >= self._max_in_flight:
            oldest = next(iter(facts.requests))
            facts.running -= facts.requests.pop(oldest).started is not None
            self.forgotten += 1
        facts.requests[request_id] = Times(now)

    def started(self, stage: int, replica: int, request_id: str, now: float) -> None:
        """Record that a request began to run; only the first time counts, and unknown requests are ignored."""
        facts = self._replica(stage, replica)
        times = facts.requests.get(request_id)
        if times is not None and times.started is None:
            times.started = now
            facts.running += 1
            facts.queue_seconds.observe(max(0.0, now - times.submitted))

    def finished(self, stage: int, replica: int, request_id: str, now: float, ok: bool = True) -> None:
        """Record that the stage is done with a request; the latency of failed ones is not observed."""
        facts = self._replica(stage, replica)
        times = self._end(facts, request_id, Outcome.FINISHED if ok else Outcome.FAILED)
        if times is not None and ok:
            facts.latency_seconds.observe(max(0.0, now - times.submitted))

    def aborted(self, stage: int, replica: int, request_id: str) -> None:
        """Record that a request was aborted."""
        self._end(self._replica(stage, replica), request_id, Outcome.ABORTED)

    def lost(self, stage: int, replica: int) -> tuple[str, ...]:
        """Record the death of a replica, and return the requests that were on it, in order of arrival."""
        facts = self._replica(stage, replica)
        gone = tuple(facts.requests)
        for request_id in gone:
            self._end(facts, request_id, Outcome.LOST)
        facts.device_bytes = facts.host_bytes = None
        return gone

    def batch(self, stage: int, replica: int, size: int) -> None:
        """Record the size of a batch that ran."""
        self._replica(stage, replica).batch_size.observe(_amount("size", size))

    def batch_limit(self, stage: int, replica: int, limit: int) -> None:
        """Set the current limit on the requests of a batch."""
        self._replica(stage, replica).batch_limit = int(_amount("limit", limit))

    def memory(self, stage: int, replica: int, device_bytes: int | None, host_bytes: int | None) -> None:
        """Set the memory that the replica holds; None leaves a value as it is."""
        facts = self._replica(stage, replica)
        for name, value in (("device_bytes", device_bytes), ("host_bytes", host_bytes)):
            if value is not None:
                setattr(facts, name, int(_amount(name, value)))

    def looked_up(self, stage: int, replica: int, hit: bool) -> None:
        """Record whether a request went to a replica that had its data."""
        self._replica(stage, replica).lookups[(Lookup.HIT if hit else Lookup.MISS).value] += 1

    def cache(self, stage: int, replica: int, cache: str, hits: int, misses: int) -> None:
        """Record the hits and misses in a replica's own cache: tokens in "prefix", items in "encoder"."""
        facts = self._replica(stage, replica)
        counts = {"prefix": facts.prefix_tokens, "encoder": facts.encoder_items}
        if cache not in counts:
            raise ValueError(f"unknown cache {cache!r}, known are {list(counts)}")
        for result, number in ((Lookup.HIT.value, hits), (Lookup.MISS.value, misses)):
            counts[cache][result] = counts[cache].get(result, 0) + int(_amount(result, number))

    def restarted(self, stage: int, replica: int) -> None:
        """Record a restart of the replica."""
        self._replica(stage, replica).restarts += 1

    def redispatched(self, stage: int, replica: int, requests: int = 1) -> None:
        """Record that so many requests were moved from this replica to another."""
        self._replica(stage, replica).redispatched += int(_amount("requests", requests))

    def incident(self, stage: int, replica: int, kind: str) -> None:
        """Record an incident of the replica."""
        _add(self._replica(stage, replica).incidents, kind, "incident")

    def anomaly(self, stage: int, kind: str) -> None:
        """Record an anomaly of the stage, or of an edge that leads to it."""
        _add(self._stage(stage).anomalies, kind, "anomaly")

    def given_up(self, stage: int, reason: str) -> None:
        """Record a request that failed in the stage."""
        _add(self._stage(stage).given_up, reason, "reason")

    def merged(self, stage: int, requests: int = 1) -> None:
        """Record that so many requests got the output of another's work."""
        self._stage(stage).merged += int(_amount("requests", requests))

    def credits(self, stage: int, free: int) -> None:
        """Set how many more requests the stage may hold."""
        self._stage(stage).credits_free = int(_amount("free", free))

    def edge(self, from_stage: int, to_stage: int, seconds: float) -> None:
        """Record the time of handing a request over."""
        _amount("seconds", seconds)
        self._edge(from_stage, to_stage).transfer_seconds.observe(seconds)

    def moved(self, from_stage: int, to_stage: int, side: str, messages: int, nbytes: int, seconds: float) -> None:
        """Record the time that connectors spent on messages, on the put or get side (a `Side`)."""
        if side not in (put := Side.PUT.value, Side.GET.value):
            raise ValueError(f"side must be one of {[side.value for side in Side]}, got {side!r}")
        for name, value in (("messages", messages), ("nbytes", nbytes), ("seconds", seconds)):
            _amount(name, value)
        facts = self._edge(from_stage, to_stage)
        facts.connector_seconds[side] += seconds
        if side == put:  # each message is put before it is got
            facts.messages += messages
            facts.nbytes += nbytes

    def load(self, modality: str, *, observed: float | None = None, forecast: float | None = None) -> None:
        """Set the observed and the forecast requests per second of a modality."""
        if (facts := self.loads.get(modality)) is None:
            raise ValueError(f"unknown modality {modality!r}, known are {sorted(self.loads)}")
        for name, value in (("observed", observed), ("forecast", forecast)):
            if value is not None:
                setattr(facts, name, _amount(name, value))

    def _edge(self, from_stage: int, to_stage: int) -> EdgeFacts:
        for stage in (key := (from_stage, to_stage)):
            self._stage(stage)
        if (facts := self.edges.get(key)) is None:
            facts = self.edges[key] = EdgeFacts(Histogram(TRANSFER_BUCKETS))
        return facts

    def _stage(self, stage: int) -> StageFacts:
        if (facts := self.stages.get(stage)) is None:
            raise ValueError(f"unknown stage {stage!r}, known are {list(self.stages)}")
        return facts

    def _replica(self, stage: int, replica: int) -> ReplicaFacts:
        if (facts := self.replicas.get((stage, replica))) is None:
            self._stage(stage)
            if not 0 <= replica < MAX_REPLICAS:
                raise ValueError(f"replica must be 0 to {MAX_REPLICAS - 1}, got {replica}")
            facts = self.replicas[stage, replica] = ReplicaFacts.empty(self._incidents)
        return facts

    @staticmethod
    def _end(facts: ReplicaFacts, request_id: str, outcome: Outcome) -> Times | None:
        times = facts.requests.pop(request_id, None)
        if times is not None:
            facts.running -= times.started is not None
            facts.ended[outcome.value] += 1
        return times


def _amount(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and 0 or more, got {value}")
    return value


def _add(counts: dict[str, int], kind: str, what: str) -> None:
    if kind not in counts:
        raise ValueError(f"unknown kind of {what} {kind!r}, known are {list(counts)}")
    counts[kind] += 1
