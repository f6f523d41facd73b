"""What happens in stages and between them, in one place: an adapter feeds it, ``/metrics`` reads it.

Pure: the time is an argument. One thread writes; any thread may read. Memory is bounded: by the graph, and by
`max_in_flight` requests of a replica, of which the oldest are forgotten.
"""

import math
from collections.abc import Iterable

from vllm_omni_sched.monitor.counts import Histogram
from vllm_omni_sched.monitor.stage_facts import (
    TRANSFER_BUCKETS,
    EdgeFacts,
    LoadFacts,
    Lookup,
    Outcome,
    ReplicaFacts,
    Side,
    StageFacts,
    Times,
)

MAX_REPLICAS = 1024
"""Of one stage: what a label may be."""


class StageBoard:
    """Counts and times of each stage and replica.

    Args:
        stages: ids of the graph's stages.
        anomalies, incidents, reasons: the kinds that `anomaly`, `incident` and `given_up` may be told, as the labels of
            metrics: those of the enums that the detectors and the recovery use.
        modalities: that `load` may be told.
        max_in_flight: requests of a replica whose times are kept.

    Raises:
        ValueError: there is no stage, or a bound is below 1. Its methods: a stage, replica, kind or modality is
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
            raise ValueError(f"stages and max_in_flight must be 1 or more, got {given}")
        self.replicas: dict[tuple[int, int], ReplicaFacts] = {}
        self.edges: dict[tuple[int, int], EdgeFacts] = {}
        self.loads = {modality: LoadFacts() for modality in ("text", "image", "audio", "video")}
        self.forgotten = 0  # requests that did not end before `max_in_flight` others came
        self._incidents = tuple(incidents)
        self._max_in_flight = max_in_flight

    def submitted(self, stage: int, replica: int, request_id: str, now: float) -> None:
        """A request was sent to a replica; if it is there already, what it did there so far counts as aborted."""
        facts = self._replica(stage, replica)
        self._end(facts, request_id, Outcome.ABORTED)
        if len(facts.requests) >= self._max_in_flight:
            oldest = next(iter(facts.requests))
            facts.running -= facts.requests.pop(oldest).started is not None
            self.forgotten += 1
        facts.requests[request_id] = Times(now)

    def started(self, stage: int, replica: int, request_id: str, now: float) -> None:
        """It began to run; only the first time counts. Unknown requests are nobody's."""
        facts = self._replica(stage, replica)
        times = facts.requests.get(request_id)
        if times is not None and times.started is None:
            times.started = now
            facts.running += 1
            facts.queue_seconds.observe(max(0.0, now - times.submitted))

    def finished(self, stage: int, replica: int, request_id: str, now: float, ok: bool = True) -> None:
        """The stage is through with it; latency is that of requests that went well."""
        facts = self._replica(stage, replica)
        times = self._end(facts, request_id, Outcome.FINISHED if ok else Outcome.FAILED)
        if times is not None and ok:
            facts.latency_seconds.observe(max(0.0, now - times.submitted))

    def aborted(self, stage: int, replica: int, request_id: str) -> None:
        """Nobody wants it any more."""
        self._end(self._replica(stage, replica), request_id, Outcome.ABORTED)

    def lost(self, stage: int, replica: int) -> tuple[str, ...]:
        """The replica died; the requests that were in it, in the order they came."""
        facts = self._replica(stage, replica)
        gone = tuple(facts.requests)
        for request_id in gone:
            self._end(facts, request_id, Outcome.LOST)
        facts.device_bytes = facts.host_bytes = None
        return gone

    def batch(self, stage: int, replica: int, size: int) -> None:
        """A batch of so many requests ran."""
        self._replica(stage, replica).batch_size.observe(_amount("size", size))

    def batch_limit(self, stage: int, replica: int, limit: int) -> None:
        """How many requests a batch may have now."""
        self._replica(stage, replica).batch_limit = int(_amount("limit", limit))

    def memory(self, stage: int, replica: int, device_bytes: int | None, host_bytes: int | None) -> None:
        """What the replica holds now; None for what is not known."""
        facts = self._replica(stage, replica)
        for name, value in (("device_bytes", device_bytes), ("host_bytes", host_bytes)):
            if value is not None:
                setattr(facts, name, int(_amount(name, value)))

    def looked_up(self, stage: int, replica: int, hit: bool) -> None:
        """A request went to this replica: one that had data of it, or not."""
        self._replica(stage, replica).lookups[(Lookup.HIT if hit else Lookup.MISS).value] += 1

    def cache(self, stage: int, replica: int, cache: str, hits: int, misses: int) -> None:
        """So many of what a replica looked for in its own cache were there: tokens in "prefix", items in "encoder"."""
        facts = self._replica(stage, replica)
        counts = {"prefix": facts.prefix_tokens, "encoder": facts.encoder_items}
        if cache not in counts:
            raise ValueError(f"unknown cache {cache!r}, known are {list(counts)}")
        for result, number in ((Lookup.HIT.value, hits), (Lookup.MISS.value, misses)):
            counts[cache][result] = counts[cache].get(result, 0) + int(_amount(result, number))

    def restarted(self, stage: int, replica: int) -> None:
        """The replica was started again."""
        self._replica(stage, replica).restarts += 1

    def redispatched(self, stage: int, replica: int, requests: int = 1) -> None:
        """So many requests were taken from this replica to another."""
        self._replica(stage, replica).redispatched += int(_amount("requests", requests))

    def incident(self, stage: int, replica: int, kind: str) -> None:
        """Something happened to the replica."""
        _add(self._replica(stage, replica).incidents, kind, "incident")

    def anomaly(self, stage: int, kind: str) -> None:
        """Something was found to be wrong with the stage, or with an edge that leads to it."""
        _add(self._stage(stage).anomalies, kind, "anomaly")

    def given_up(self, stage: int, reason: str) -> None:
        """A request was failed in the stage."""
        _add(self._stage(stage).given_up, reason, "reason")

    def merged(self, stage: int, requests: int = 1) -> None:
        """So many requests got the output of another's work."""
        self._stage(stage).merged += int(_amount("requests", requests))

    def credits(self, stage: int, free: int) -> None:
        """How many more requests the stage may hold."""
        self._stage(stage).credits_free = int(_amount("free", free))

    def edge(self, from_stage: int, to_stage: int, seconds: float) -> None:
        """To hand a request over took so long."""
        _amount("seconds", seconds)
        self._edge(from_stage, to_stage).transfer_seconds.observe(seconds)

    def moved(self, from_stage: int, to_stage: int, side: str, messages: int, nbytes: int, seconds: float) -> None:
        """Connectors had so many messages in hand for so long, where they are put or got (a `Side`)."""
        if side not in (put := Side.PUT.value, Side.GET.value):
            raise ValueError(f"side must be one of {[side.value for side in Side]}, got {side!r}")
        for name, value in (("messages", messages), ("nbytes", nbytes), ("seconds", seconds)):
            _amount(name, value)
        facts = self._edge(from_stage, to_stage)
        facts.connector_seconds[side] += seconds
        if side == put:  # what is got was put before
            facts.messages += messages
            facts.nbytes += nbytes

    def load(self, modality: str, *, observed: float | None = None, forecast: float | None = None) -> None:
        """Requests per second that came, and that the forecast says will come."""
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
