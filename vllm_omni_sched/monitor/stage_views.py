"""What a `StageBoard` says of one moment."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni_sched.monitor.stage_facts import EdgeFacts, Lookup, Quantiles, ReplicaFacts


@dataclass(frozen=True)
class ReplicaView:
    """One replica now. ``oldest_seconds``: how long the request that came first of those in it has been there.

    ``cache_hit_rate``: of affinity; ``cache_hit_rates``: of the caches that the replica itself has.
    """

    stage: int
    replica: int
    waiting: int
    running: int
    oldest_seconds: float
    ended: Mapping[str, int]
    latency: Quantiles
    queue: Quantiles
    batch_size: Quantiles
    batch_limit: int | None
    device_bytes: int | None
    host_bytes: int | None
    cache_hit_rate: float | None
    cache_hit_rates: Mapping[str, float]


@dataclass(frozen=True)
class EdgeView:
    """One edge now. ``bytes_per_second``: of the last messages, while connectors had them in hand."""

    from_stage: int
    to_stage: int
    messages: int
    nbytes: int
    bytes_per_second: float | None
    transfer: Quantiles


@dataclass(frozen=True)
class BoardSnapshot:
    """Everything at one moment, in the order of stages and replicas."""

    now: float
    replicas: tuple[ReplicaView, ...]
    edges: tuple[EdgeView, ...]
    credits_free: Mapping[int, int]


def replica_view(key: tuple[int, int], facts: ReplicaFacts, now: float) -> ReplicaView:
    """Of a replica, by its stage and id."""
    first = next(iter(facts.requests.values()), None)
    looked = sum(facts.lookups.values())
    return ReplicaView(
        *key,
        waiting=facts.waiting,
        running=facts.running,
        oldest_seconds=0.0 if first is None else max(0.0, now - first.submitted),
        ended=dict(facts.ended),
        latency=facts.latency_seconds.quantiles,
        queue=facts.queue_seconds.quantiles,
        batch_size=facts.batch_size.quantiles,
        batch_limit=facts.batch_limit,
        device_bytes=facts.device_bytes,
        host_bytes=facts.host_bytes,
        cache_hit_rate=facts.lookups[Lookup.HIT.value] / looked if looked else None,
        cache_hit_rates={
            name: counts[Lookup.HIT.value] / total
            for name, counts in (("prefix", facts.prefix_tokens), ("encoder", facts.encoder_items))
            if (total := sum(counts.values()))
        },
    )


def edge_view(key: tuple[int, int], facts: EdgeFacts) -> EdgeView:
    """Of an edge, by its stages."""
    recent = list(facts.recent)
    seconds = sum(took for _, took in recent)
    return EdgeView(
        *key,
        messages=facts.messages,
        nbytes=facts.nbytes,
        bytes_per_second=sum(nbytes for nbytes, _ in recent) / seconds if seconds else None,
        transfer=facts.transfer_seconds.quantiles,
    )
