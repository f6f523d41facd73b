"""Metric families of the API process, on its ``/metrics``.

vLLM clears all families named ``vllm:`` from its registry when it sets up its own metrics. Therefore ours are in no
registry, but behind one collector without a name. If several API servers share a port, prometheus_client keeps values
in files that its own collector reads, and nothing needs to be registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm_omni_sched.monitor.metrics import PREFIX, Kind

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class FrontEndMetric:
    """A metric family. Series for ``values`` of its label exist from the start, others appear as they occur."""

    name: str
    kind: Kind
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()


class FrontEndMetrics(Collector):
    """Holds families that are in no registry."""

    def __init__(self, metrics: Sequence[FrontEndMetric]) -> None:
        self._metrics = {metric.name: _make(metric) for metric in metrics}

    def attach(self) -> None:
        """Add these metrics to ``/metrics`` of this process."""
        REGISTRY.register(self)

    def collect(self) -> Iterable[Family]:
        """Return all families of this process."""
        return [family for metric in self._metrics.values() for family in metric.collect()]

    def describe(self) -> Iterable[Family]:
        """Return the families for their names."""
        return self.collect()


def _make(metric: FrontEndMetric) -> Any:
    names = (metric.label,) if metric.label else ()
    name = PREFIX + metric.name
    made: Any
    if metric.kind == "histogram":
        made = Histogram(name, metric.help, names, buckets=_BUCKETS, registry=None)
    elif metric.kind == "gauge":
        made = Gauge(name, metric.help, names, registry=None, multiprocess_mode="livesum")
    else:
        made = Counter(name, metric.help, names, registry=None)
    for value in metric.values:
        made.labels(value)
    return made
