"""Turn the counters of a vLLM server into intervals of a trace. Pure: two scrapes make one interval.

It reads, of vLLM 0.30 (``vllm/v1/metrics/loggers.py``): ``vllm:request_success_total``, ``vllm:num_requests_running``,
``vllm:num_requests_waiting``, ``vllm:mm_cache_queries_total`` (items, of whatever modality), and the histograms
``vllm:request_prompt_tokens``, ``vllm:request_generation_tokens`` and ``vllm:request_params_max_tokens``.
Of ours, where `slo_metrics` is on: ``vllm:omni_sched_slo_met_total`` and ``vllm:omni_sched_slo_missed_total`` by class.
All engines and models of a server are summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.monitor.metrics import PREFIX
from vllm_omni_sched.sim.workloads.trace import Interval, Tokens

_FINISHED, _ITEMS = "vllm:request_success_total", "vllm:mm_cache_queries_total"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_BY_CLASS = (PREFIX + "slo_met_total", PREFIX + "slo_missed_total")
_HISTOGRAMS = {
    "vllm:request_prompt_tokens": "prompt_tokens",
    "vllm:request_generation_tokens": "generation_tokens",
    "vllm:request_params_max_tokens": "max_tokens",
}
STARTED = "process_start_time_seconds"


@dataclass
class Scrape:
    """One scrape: counters and gauges by name, requests by class, and for histograms the cumulative counts by bound."""

    values: dict[str, float] = field(default_factory=dict)
    classes: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)

    def counters(self) -> dict[str, float]:
        """Return all values that never fall while a server runs."""
        found = {name: value for name, value in self.values.items() if name not in (_RUNNING, _WAITING)}
        found |= {f"class {name}": value for name, value in self.classes.items()}
        for name, buckets in self.buckets.items():
            found |= {f"{name} {bound}": value for bound, value in buckets.items()}
        return found

    def restarted(self, later: Scrape) -> bool:
        """Return whether the server has restarted before a later scrape."""
        before, now = self.counters(), later.counters()
        lower = any(now.get(name, 0.0) < value for name, value in before.items())
        return lower or before.get(STARTED) != now.get(STARTED)


def read_metrics(text: str) -> Scrape:
    """Return the load metrics of a page.

    Raises:
        ConfigError: it is not in the text format of Prometheus, or not from a vLLM server.
    """
    found = Scrape()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                _take(found, sample.name, sample.labels, sample.value)
    except ValueError as error:
        raise ConfigError(f"not metrics in the text format of Prometheus: {error}") from None
    missing = [name for name in (_FINISHED, _RUNNING, _WAITING) if name not in found.values]
    if missing:
        raise ConfigError(f"not the metrics of a vLLM server: {missing[0]} is missing")
    return found


def _take(found: Scrape, name: str, labels: Mapping[str, str], value: float) -> None:
    family = name.removesuffix("_bucket")
    if family in _HISTOGRAMS and family != name:
        buckets = found.buckets.setdefault(_HISTOGRAMS[family], {})
        bound = float(labels["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
    elif name in _BY_CLASS:
        found.classes[labels.get("class", "")] = found.classes.get(labels.get("class", ""), 0.0) + value
    elif name in (_FINISHED, _ITEMS, _RUNNING, _WAITING, STARTED) or name.removesuffix("_sum") in _HISTOGRAMS:
        found.values[name] = found.values.get(name, 0.0) + value


class Recorder:
    """Makes intervals from scrapes of a server.

    1. The server counts finished requests. Arrivals are the finished ones plus the increase of waiting and running
       ones. These are not counted at the same instant: if that makes arrivals negative, they are 0 and the rest
       is subtracted from the next interval, so that their sum stays right.
    2. If a counter has fallen, or the process is another, the server has restarted: all that it has counted since
       belongs to this interval, which is marked. What it did between the last scrape and its end is lost.
    3. Items have no modality on a metrics page: "unknown".
    """

    def __init__(self, first: Scrape, now: float) -> None:
        self._before = first
        self._begin = self._last = now
        self._owed = 0

    def interval(self, scrape: Scrape, now: float) -> Interval:
        """Return the interval from the last scrape to this one, taken at ``now`` by the same clock.

        Raises:
            ValueError: ``now`` is not later.
        """
        at, end = round(self._last - self._begin, 3), round(now - self._begin, 3)
        if not end > at:
            raise ValueError(f"a scrape at {now} is not later than the last one at {self._last}")
        before, restarted = self._before, self._before.restarted(scrape)
        if restarted:
            before, self._owed = Scrape(), 0
        found = between(before, scrape, at, round(end - at, 3), self._owed)
        self._owed = max(0, self._owed - found.finished - _in_flight(scrape) + _in_flight(before))
        self._before, self._last = scrape, now
        return msgspec.structs.replace(found, restarted=restarted)


def between(before: Scrape, scrape: Scrape, at: float, seconds: float, owed: int = 0) -> Interval:
    """Return the interval between two scrapes; ``owed``: arrivals that earlier intervals have too many."""
    finished = _whole(scrape.values, before.values, _FINISHED)
    items = _whole(scrape.values, before.values, _ITEMS)
    classes = {name: _whole(scrape.classes, before.classes, name) for name in sorted(scrape.classes)}
    return Interval(
        at=at,
        seconds=seconds,
        arrivals=max(0, finished + _in_flight(scrape) - _in_flight(before) - owed),
        finished=finished,
        prompt_tokens=_tokens(scrape, before, "vllm:request_prompt_tokens"),
        generation_tokens=_tokens(scrape, before, "vllm:request_generation_tokens"),
        max_tokens=_tokens(scrape, before, "vllm:request_params_max_tokens"),
        items={"unknown": items} if items else {},
        classes={name: number for name, number in classes.items() if number},
        waiting=round(scrape.values[_WAITING]),
        running=round(scrape.values[_RUNNING]),
    )


def _in_flight(scrape: Scrape) -> int:
    return round(scrape.values.get(_WAITING, 0.0) + scrape.values.get(_RUNNING, 0.0))


def _whole(now: Mapping[str, float], before: Mapping[str, float], name: str) -> int:
    return max(0, round(now.get(name, 0.0) - before.get(name, 0.0)))


def _tokens(now: Scrape, before: Scrape, name: str) -> Tokens:
    """Return the increase of a histogram by bucket, without empty buckets."""
    key = _HISTOGRAMS[name]
    then = before.buckets.get(key, {})
    buckets: list[tuple[float | None, int]] = []
    below, bottom = 0.0, None
    for bound, cumulative in sorted(now.buckets.get(key, {}).items()):
        more = cumulative - then.get(bound, 0.0)
        number = round(more - below)
        if number > 0:
            if bottom is not None and (not buckets or buckets[-1][0] != bottom):
                buckets.append((bottom, 0))  # an empty bucket marks the begin of the next one
            buckets.append((None if math.isinf(bound) else bound, number))
        below, bottom = more, bound
    return Tokens(tuple(buckets), max(0.0, now.values.get(name + "_sum", 0.0) - before.values.get(name + "_sum", 0.0)))
