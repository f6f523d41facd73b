"""Publish `StageBoard` on ``/metrics``: the registry of its metrics, and the collector.

Names get the prefix of `monitor.metrics`; base units; every label is a closed set: the ids of the graph's stages and
their replicas, and kinds of enums.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm_omni_sched.monitor.exposition import add_value, empty_family
from vllm_omni_sched.monitor.metrics import PREFIX, Kind
from vllm_omni_sched.monitor.stage_board import Lookup, Outcome, Side, StageBoard


class Scope(Enum):
    """Scope of a metric; the value holds its labels."""

    REPLICA = ("stage", "replica")
    STAGE = ("stage",)
    EDGE = ("from_stage", "to_stage")
    MODALITY = ("modality",)


@dataclass(frozen=True)
class StageMetric:
    """One metric family.

    ``field``: the attribute of the scope's facts: a number, None (unknown: no sample), a `Histogram`, or with `label`
    a dict by label value. ``values``: the label's values where we define them.
    """

    name: str
    kind: Kind
    help: str
    scope: Scope
    field: str
    label: str | None = None
    values: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """Return the name as it appears on /metrics."""
        return PREFIX + self.name

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the metric's labels."""
        return (*self.scope.value, *([self.label] if self.label else []))


_OUTCOMES = tuple(outcome.value for outcome in Outcome)
_LOOKUPS = tuple(result.value for result in Lookup)
_SIDES = tuple(side.value for side in Side)

STAGE_METRICS = (
    StageMetric(
        "stage_requests_total",
        "counter",
        "Requests that left a replica, by outcome; lost: the replica died while it had them.",
        Scope.REPLICA,
        "ended",
        "outcome",
        _OUTCOMES,
    ),
    StageMetric(
        "stage_latency_seconds",
        "histogram",
        "Time from sending a request to a replica until it finished; failed requests are left out.",
        Scope.REPLICA,
        "latency_seconds",
    ),
    StageMetric(
        "stage_queue_seconds",
        "histogram",
        "Time from sending a request to a replica until it began to run.",
        Scope.REPLICA,
        "queue_seconds",
    ),
    StageMetric("stage_waiting", "gauge", "Requests in a replica that wait to run.", Scope.REPLICA, "waiting"),
    StageMetric("stage_running", "gauge", "Requests in a replica that run.", Scope.REPLICA, "running"),
    StageMetric("stage_batch_requests", "histogram", "Requests in a batch.", Scope.REPLICA, "batch_size"),
    StageMetric(
        "stage_batch_limit",
        "gauge",
        "Most requests that a replica gets: its `max_num_seqs`, or with option `batching.target_latency_ms` the "
        "controller's limit on those whose latency is measured.",
        Scope.REPLICA,
        "batch_limit",
    ),
    StageMetric(
        "stage_device_memory_bytes", "gauge", "Device memory that a replica holds.", Scope.REPLICA, "device_bytes"
    ),
    StageMetric("stage_host_memory_bytes", "gauge", "Host memory that a replica holds.", Scope.REPLICA, "host_bytes"),
    StageMetric(
        "stage_cache_lookups_total",
        "counter",
        "Requests by whether the replica they went to had data of theirs (hit) or not (miss); option `graph.affinity`.",
        Scope.REPLICA,
        "lookups",
        "result",
        _LOOKUPS,
    ),
    StageMetric(
        "stage_prefix_cache_tokens_total",
        "counter",
        "Tokens of prompts by whether the replica had them in its prefix cache (hit) or not (miss).",
        Scope.REPLICA,
        "prefix_tokens",
        "result",
        _LOOKUPS,
    ),
    StageMetric(
        "stage_encoder_cache_items_total",
        "counter",
        "Multimodal items by whether the replica had them encoded (hit) or not (miss).",
        Scope.REPLICA,
        "encoder_items",
        "result",
        _LOOKUPS,
    ),
    StageMetric(
        "stage_merged_requests_total",
        "counter",
        "Requests that got the output of identical work of another; option `graph.merging`.",
        Scope.STAGE,
        "merged",
    ),
    StageMetric(
        "stage_credits_free",
        "gauge",
        "Requests that the stage may take on top of those it holds; option `runtime.credits`.",
        Scope.STAGE,
        "credits_free",
    ),
    StageMetric("stage_edge_messages_total", "counter", "Messages that connectors have sent.", Scope.EDGE, "messages"),
    StageMetric(
        "stage_edge_bytes_total", "counter", "Bytes of messages that connectors have sent.", Scope.EDGE, "nbytes"
    ),
    StageMetric(
        "stage_edge_connector_seconds_total",
        "counter",
        "Time that connectors spent on messages, by side (put or get).",
        Scope.EDGE,
        "connector_seconds",
        "side",
        _SIDES,
    ),
    StageMetric(
        "stage_edge_transfer_seconds",
        "histogram",
        "Time that the front end took to hand a request over to the next stage.",
        Scope.EDGE,
        "transfer_seconds",
    ),
    StageMetric("stage_restarts_total", "counter", "Restarts of a replica.", Scope.REPLICA, "restarts"),
    StageMetric(
        "stage_redispatched_requests_total",
        "counter",
        "Requests that were moved from a replica to another.",
        Scope.REPLICA,
        "redispatched",
    ),
    StageMetric(
        "stage_incidents_total",
        "counter",
        "Incidents of a replica, by kind; option `runtime.recovery`.",
        Scope.REPLICA,
        "incidents",
        "kind",
    ),
    StageMetric(
        "stage_anomalies_total",
        "counter",
        "Anomalies of a stage or of an edge that leads to it, by kind; option `monitoring.anomaly`.",
        Scope.STAGE,
        "anomalies",
        "kind",
    ),
    StageMetric(
        "stage_given_up_requests_total",
        "counter",
        "Requests failed in a stage, by reason; options `runtime.recovery` and `runtime.stall_seconds`.",
        Scope.STAGE,
        "given_up",
        "reason",
    ),
    StageMetric(
        "stage_arrivals_observed",
        "gauge",
        "Observed requests per second; option `monitoring.forecast`.",
        Scope.MODALITY,
        "observed",
    ),
    StageMetric(
        "stage_arrivals_forecast",
        "gauge",
        "Requests per second that were forecast for the present bin.",
        Scope.MODALITY,
        "forecast",
    ),
)


class StageCollector(Collector):
    """Collects the metric families of a board for a `prometheus_client` registry."""

    def __init__(self, board: StageBoard) -> None:
        self._board = board

    def describe(self) -> Iterable[Family]:
        """Return the families without values, so that registering reads no board."""
        return [_family(metric) for metric in STAGE_METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield all families of `STAGE_METRICS`."""
        for metric in STAGE_METRICS:
            family = _family(metric)
            for labels, value in samples(metric, self._board):
                add_value(family, labels, value)
            yield family


def samples(metric: StageMetric, board: StageBoard) -> Iterator[tuple[list[str], Any]]:
    """Yield the label values, and the number or histogram, of each sample that exists now."""
    for key, facts in list(_facts(metric.scope, board).items()):
        labels = [str(part) for part in (key if isinstance(key, tuple) else (key,))]
        found = getattr(facts, metric.field)
        if metric.label is not None:
            for value, number in list(found.items()):
                yield [*labels, value], number
        elif found is not None:
            yield labels, found


def _facts(scope: Scope, board: StageBoard) -> Mapping[Any, Any]:
    if scope is Scope.REPLICA:
        return board.replicas
    if scope is Scope.STAGE:
        return board.stages
    return board.edges if scope is Scope.EDGE else board.loads


def _family(metric: StageMetric) -> Any:
    return empty_family(metric.kind, metric.full_name, metric.help, metric.labels)
