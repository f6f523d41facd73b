"""Read what a server does from the text of its ``/metrics``: sums over engines, and what changed between two reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.monitor.metrics import PREFIX

VLLM = "vllm:"
_SPLIT = ("engine", "model_name")
"""Labels over which samples are summed."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ServerPage:
    """Samples of one read of ``/metrics``, summed over engines.

    ``at``: when it was read, in monotonic seconds. ``numbers``: how many samples of each name were read.
    """

    at: float
    samples: Mapping[str, Mapping[Labels, float]]
    numbers: Mapping[str, int]

    @property
    def has_ours(self) -> bool:
        """Return whether the server publishes metrics of this package."""
        return any(name.startswith(PREFIX) for name in self.samples)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples with these labels; None if there are none."""
        wanted = set(labels.items())
        found = [value for key, value in self.samples.get(name, {}).items() if wanted <= set(key)]
        return sum(found) if found else None

    def mean(self, name: str) -> float | None:
        """Return the mean over engines of a gauge without further labels, such as a fraction; None if there is none."""
        total = self.value(name)
        return None if total is None else total / self.numbers[name]

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums of the samples with these labels, by the value of another label, in the page's order."""
        sums: dict[str, float] = {}
        wanted = set(labels.items())
        for key, value in self.samples.get(name, {}).items():
            of = dict(key).get(label)
            if of is not None and wanted <= set(key):
                sums[of] = sums.get(of, 0.0) + value
        return sums

    def since(self, earlier: ServerPage | None) -> ServerPage:
        """Return this page with the counts that were added since an earlier one, and the gauges of now.

        If a count is lower than before, the server has started again: then all counts are those since its start.
        """
        if earlier is None or self.restarted_since(earlier):
            return self
        samples = {
            name: {
                key: value - earlier.samples.get(name, {}).get(key, 0.0) if _is_count(name) else value
                for key, value in found.items()
            }
            for name, found in self.samples.items()
        }
        return ServerPage(self.at, samples, self.numbers)

    def restarted_since(self, earlier: ServerPage) -> bool:
        """Return whether the server has started again since an earlier page: its steps are fewer than before."""
        steps = f"{PREFIX}steps_total"
        return (self.value(steps) or 0.0) < (earlier.value(steps) or 0.0)

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """Return a quantile of a histogram, interpolated in its bucket as Prometheus does; None without observations.

        A quantile in the open last bucket is the largest bound.
        """
        counts = sorted((float(bound), count) for bound, count in self.by(f"{name}_bucket", "le", **labels).items())
        return quantile(counts, q)


def quantile(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """Return a quantile of cumulative buckets, ``(upper bound, count)`` ascending, the last one open; None if empty."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = q * buckets[-1][1]
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = (bound if bound != float("inf") else low), count
    return low


def read_page(text: str, at: float) -> ServerPage:
    """Return the samples of vLLM, vLLM-Omni and this package in the text of ``/metrics``.

    Raises:
        ConfigError: it is not in the Prometheus text format.
    """
    samples: dict[str, dict[Labels, float]] = {}
    numbers: Counter[str] = Counter()
    try:
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(VLLM):
                continue
            for sample in family.samples:
                key = _key(sample.labels.items())
                sums = samples.setdefault(sample.name, {})
                sums[key] = sums.get(key, 0.0) + sample.value
                numbers[sample.name] += 1
    except ValueError as error:
        raise ConfigError(f"it is not a page of metrics in the Prometheus text format: {error}") from None
    return ServerPage(at, samples, numbers)


def _key(labels: Iterable[tuple[str, str]]) -> Labels:
    return tuple(sorted((name, value) for name, value in labels if name not in _SPLIT))


def _is_count(name: str) -> bool:
    return name.endswith(("_total", "_bucket", "_count", "_sum"))
