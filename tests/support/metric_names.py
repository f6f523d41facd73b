"""All metrics that this package publishes, with their labels, from the registries that the documentation is made of."""

import re
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily

from vllm_omni_sched.engine.preprocess.metrics import PREPROCESS_METRICS
from vllm_omni_sched.engine.video.metrics import VIDEO_METRICS
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.device_metrics import DEVICE_LABELS, DEVICE_METRICS
from vllm_omni_sched.monitor.exposition import values_of
from vllm_omni_sched.monitor.metrics import METRICS, PREFIX
from vllm_omni_sched.monitor.stage_metrics import STAGE_METRICS
from vllm_omni_sched.omni.metrics import FACTS, TIMES

NAME = re.compile(r"vllm:\w+")
OF_SCRAPES = {"instance", "job", "le"}
"""Labels that Prometheus adds, and that of buckets."""


class Known(NamedTuple):
    """A metric: its kind, and the values of each label; None where they are not known in advance."""

    kind: str
    labels: dict[str, frozenset[str] | None]


def engine_metrics() -> dict[str, Known]:
    found = {}
    for metric in METRICS:
        labels = dict.fromkeys(("engine", "model_name"))
        if metric.label:
            labels[metric.label] = frozenset(value for value, _ in values_of(metric, SchedulerMetrics()))
        found[metric.full_name] = Known(metric.kind, labels)
    return found


def front_end_metrics() -> dict[str, Known]:
    return {
        PREFIX + metric.name: Known(
            metric.kind, {metric.label: frozenset(metric.values) or None} if metric.label else {}
        )
        for metric in (*VIDEO_METRICS, *PREPROCESS_METRICS)
    }


def device_metrics() -> dict[str, Known]:
    return {metric.full_name: Known("gauge", dict.fromkeys(DEVICE_LABELS)) for metric in DEVICE_METRICS}


def stage_metrics() -> dict[str, Known]:
    return {
        metric.full_name: Known(
            metric.kind,
            {name: frozenset(metric.values) or None if name == metric.label else None for name in metric.labels},
        )
        for metric in STAGE_METRICS
    }


def connector_metrics() -> dict[str, Known]:
    found = {PREFIX + name: Known("histogram", dict.fromkeys(("stage", "path"))) for name, _ in TIMES.values()}
    for fact in FACTS:
        counter = fact.kind is CounterMetricFamily
        name = PREFIX + fact.name + ("_total" if counter else "")
        labels = dict.fromkeys(("stage", "path", *([fact.label] if fact.label else [])))
        found[name] = Known("counter" if counter else "gauge", labels)
    return found


def all_metrics() -> dict[str, Known]:
    return engine_metrics() | front_end_metrics() | device_metrics() | stage_metrics() | connector_metrics()


def base_names(expr: str, known: dict[str, Known]) -> set[str]:
    """Return the metrics in a query; the series of a histogram are that histogram, other names stay as they are."""
    found = set()
    for name in NAME.findall(expr):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        found.add(base if base in known and known[base].kind == "histogram" else name)
    return found


def labels_asked(expr: str) -> set[str]:
    """Return the labels by which a query groups or selects."""
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expr) for label in group.split(",")}
    return grouped | set(re.findall(r"(\w+)=~?\"", expr))
