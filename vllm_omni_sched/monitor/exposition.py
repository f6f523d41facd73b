"""Render `SchedulerMetrics` as Prometheus text, and merge several such texts into the families of one scrape."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from vllm_omni_sched.monitor.counts import Histogram, SchedulerMetrics
from vllm_omni_sched.monitor.metrics import EACH, METRICS, PREFIX, Kind, Metric


def render(metrics: SchedulerMetrics) -> bytes:
    """Return the families of `METRICS` that have samples in the Prometheus text format, UTF-8."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SchedulerCollector(metrics))
    return generate_latest(registry)


def merge(pages: Iterable[tuple[Mapping[str, str], str]]) -> list[Family]:
    """Return the families of several rendered pages, each given with the labels for its samples.

    Samples with equal name and labels are summed. Families of other packages are left out.

    Raises:
        ValueError: a page is not in the Prometheus text format.
    """
    families: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for labels, page in pages:
        for read in text_string_to_metric_families(page):
            if not read.name.startswith(PREFIX):
                continue
            families.setdefault(read.name, Family(read.name, read.documentation, read.type))
            sums = values.setdefault(read.name, {})
            for sample in read.samples:
                key = (sample.name, tuple({**labels, **sample.labels}.items()))
                sums[key] = sums.get(key, 0.0) + sample.value
    for name, family in families.items():
        for (sample_name, sample_labels), value in values[name].items():
            family.add_sample(sample_name, dict(sample_labels), value)
    return list(families.values())


def values_of(spec: Metric, metrics: SchedulerMetrics) -> Iterator[tuple[str, Any]]:
    """Yield the label value, and the number or histogram, of each sample."""
    for label_value, attribute in spec.fields.items():
        found = getattr(metrics, attribute)
        if label_value == EACH:
            yield from found.items()
        else:
            yield label_value, found


class _SchedulerCollector(Collector):
    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        for spec in METRICS:
            family = _family(spec, self._metrics)
            if family.samples:
                yield family


def _family(spec: Metric, metrics: SchedulerMetrics) -> Any:
    family = empty_family(spec.kind, spec.full_name, spec.help, [spec.label] if spec.label else [])
    for label_value, value in values_of(spec, metrics):
        add_value(family, [label_value] if spec.label else [], value)
    return family


def empty_family(kind: Kind, name: str, help: str, labels: Sequence[str]) -> Any:
    """Return a family of that kind without samples."""
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    return kinds[kind](name, help, labels=labels)


def add_value(family: Any, labels: Sequence[str], value: Any) -> None:
    """Add a number or a `Histogram` to its family."""
    if isinstance(value, Histogram):
        family.add_metric(labels, cumulative(value), value.total)
    else:
        family.add_metric(labels, value)


def cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the buckets in the format of Prometheus: each includes the ones below it, the last is "+Inf"."""
    seen = 0
    buckets = []
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], list(histogram.counts), strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    return buckets
