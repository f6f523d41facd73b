"""Publish the metrics of this process's connectors as Prometheus text for ``/metrics`` of the parent process."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm_omni_sched.connectors.latency_histogram import LatencyHistogram
from vllm_omni_sched.connectors.transport import Health, Transport
from vllm_omni_sched.engine.metrics.bridge import PagePublisher
from vllm_omni_sched.monitor.metrics import PREFIX


class Source(Protocol):
    """A connector as the metrics see it: transport, health, and times by one of `TIMES` and transport."""

    times: dict[tuple[str, str], LatencyHistogram]

    @property
    def transport(self) -> Transport: ...

    def look(self) -> Health: ...


@dataclass(frozen=True)
class Fact:
    """Metric of a number in `Health.facts`, with the label ``path`` (the transport), and one more for a mapping."""

    fact: str
    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    label: str | None = None


FACTS = (
    Fact("put", "connector_messages", CounterMetricFamily, "Messages that this stage has sent."),
    Fact("put_bytes", "connector_sent_bytes", CounterMetricFamily, "Bytes of sent messages, as written."),
    Fact("inline", "connector_inline_messages", CounterMetricFamily, "Messages that were sent through the ring."),
    Fact("got", "connector_received_messages", CounterMetricFamily, "Messages that this stage has received."),
    Fact("got_bytes", "connector_received_bytes", CounterMetricFamily, "Bytes of received messages."),
    Fact("copied_bytes", "connector_copied_out_bytes", CounterMetricFamily, "Bytes that receivers have copied."),
    Fact("refused", "connector_refused_messages", CounterMetricFamily, "Messages for which a transport had no room."),
    Fact("replaced", "connector_replaced_messages", CounterMetricFamily, "Messages whose key was put again."),
    Fact("discarded", "connector_discarded_messages", CounterMetricFamily, "Messages of aborted requests, withdrawn."),
    Fact("expired", "connector_expired_messages", CounterMetricFamily, "Messages that were not received in time."),
    Fact(
        "given_back", "connector_given_back_messages", CounterMetricFamily, "Messages freed since their receiver died."
    ),
    Fact(
        "orphans_given_back",
        "connector_orphans_given_back_messages",
        CounterMetricFamily,
        "Messages freed after both sides died.",
    ),
    Fact(
        "orphans_expired",
        "connector_orphans_expired_messages",
        CounterMetricFamily,
        "Messages expired after their sender died.",
    ),
    Fact("damaged", "connector_damaged_messages", CounterMetricFamily, "Messages whose slot was damaged."),
    Fact("corrupt", "connector_corrupt_messages", CounterMetricFamily, "Messages that arrived damaged."),
    Fact("raw_bytes", "connector_compressor_in_bytes", CounterMetricFamily, "Bytes of buffers before compression."),
    Fact(
        "packed_bytes",
        "connector_compressor_out_bytes",
        CounterMetricFamily,
        "Bytes of them as sent, raw or compressed.",
    ),
    Fact(
        "cache_hits",
        "connector_compressor_cache_hits",
        CounterMetricFamily,
        "Buffers whose compressed form was cached.",
    ),
    Fact(
        "cache_misses",
        "connector_compressor_cache_misses",
        CounterMetricFamily,
        "Buffers whose compressed form was not.",
    ),
    Fact(
        "device_tensors",
        "connector_device_tensors",
        CounterMetricFamily,
        "Tensors that were sent without leaving the device.",
    ),
    Fact("device_bytes", "connector_device_bytes", CounterMetricFamily, "Bytes of device tensors."),
    Fact("device_opened", "connector_device_opened", CounterMetricFamily, "Opened handles of device memory."),
    Fact("device_held_bytes", "connector_device_held_bytes", GaugeMetricFamily, "Device memory of messages in flight."),
    Fact(
        "device_fallbacks",
        "connector_device_fallbacks",
        CounterMetricFamily,
        "Device tensors that were sent through host memory.",
        "reason",
    ),
    Fact("in_flight", "connector_in_flight_messages", GaugeMetricFamily, "Messages in flight now."),
    Fact("used_bytes", "connector_pool_used_bytes", GaugeMetricFamily, "Bytes in use.", "pool"),
    Fact("capacity_bytes", "connector_pool_capacity_bytes", GaugeMetricFamily, "Bytes reserved.", "pool"),
    Fact(
        "fragmentation",
        "connector_pool_fragmentation",
        GaugeMetricFamily,
        "Fragmentation of free memory; 0: it is contiguous.",
        "pool",
    ),
    Fact("tier_messages", "connector_tier_messages", GaugeMetricFamily, "Messages that wait in a tier.", "tier"),
    Fact("tier_bytes", "connector_tier_bytes", GaugeMetricFamily, "Bytes of those messages.", "tier"),
    Fact(
        "served",
        "connector_routed_messages",
        CounterMetricFamily,
        "Messages by edge, transport and reason.",
        "route",
    ),
    Fact("alarms", "connector_alarms", CounterMetricFamily, "Stalls and leaks, by edge and kind.", "alarm"),
)

TIMES = {
    "put": ("connector_put_seconds", "Wall time of one successful put()."),
    "get": ("connector_get_seconds", "Wall time of one get() that found a message."),
    "transfer": (
        "connector_transfer_seconds",
        "Time from put() of a message until its receiver has it, within a host.",
    ),
}
"""Histograms, with the label ``path``: the transport that carried the message."""


class ConnectorMetrics(Collector):
    """Metrics of all connectors of this process: times, and the facts of their transports, read on each scrape."""

    def __init__(self) -> None:
        self._connectors: weakref.WeakSet[Source] = weakref.WeakSet()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add(self, connector: Source) -> None:
        """Include a connector for as long as it exists."""
        self._connectors.add(connector)

    def page(self) -> bytes:
        """Return all families in the Prometheus text format, UTF-8."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Family]:
        """Yield the families of facts and times, summed over connectors."""
        sums: dict[tuple[Fact, tuple[str, ...]], float] = {}
        for connector in list(self._connectors):
            for transport, facts in _by_transport(connector.transport.name, connector.look().facts):
                for fact in FACTS:
                    for labels, value in _values(fact, facts):
                        key = (fact, (transport, *labels))
                        sums[key] = sums.get(key, 0.0) + value
        for fact in FACTS:
            family = fact.kind(PREFIX + fact.name, fact.help, labels=["path", *([fact.label] if fact.label else [])])
            for (of, labels), value in sums.items():
                if of is fact:
                    family.add_metric(labels, value)
            yield family
        yield from self._histograms()

    def _histograms(self) -> Iterator[Family]:
        sums: dict[tuple[str, str], LatencyHistogram] = {}
        for connector in list(self._connectors):
            for key, times in list(connector.times.items()):
                sums.setdefault(key, LatencyHistogram()).add(times)
        for what, (name, text) in TIMES.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=["path"])
            for (of, transport), times in sums.items():
                if of == what:
                    buckets = [(str(bound), count) for bound, count in times.buckets()]
                    family.add_metric([transport], [*buckets, ("+Inf", times.count)], sum_value=times.sum)
            yield family


def _by_transport(name: str, facts: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the facts of a transport and of its inner transports."""
    yield name, facts
    for inner, own in facts.items():
        if isinstance(own, dict) and "status" in own:
            yield from _by_transport(inner, own)


def _values(fact: Fact, facts: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    if fact.label == "pool":
        pools = facts.get("pools", {}) | ({"ring": facts["ring"]} if "ring" in facts else {})
        for pool, own in pools.items():
            if fact.fact in own:  # the ring for inline messages has no fragments
                yield (pool,), float(own[fact.fact])
    elif fact.label is not None:
        for label, value in facts.get(fact.fact, {}).items():
            yield (label,), float(value)
    elif isinstance(facts.get(fact.fact), int):
        yield (), float(facts[fact.fact])


_lock = threading.Lock()
_metrics: ConnectorMetrics | None = None


def metrics_of_this_process(stage: int) -> ConnectorMetrics:
    """Return the metrics of this process; the first call publishes them."""
    global _metrics
    with _lock:
        if _metrics is None:
            _metrics = ConnectorMetrics()
            publisher = PagePublisher(f"connectors-{stage}", {"stage": str(stage)}, _metrics.page)
            publisher.start()
            atexit.register(publisher.close)
        return _metrics
