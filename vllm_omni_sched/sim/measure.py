"""Measure runs with histograms of constant size and one record per request, and define their results."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vllm_omni_sched.sim.scenario.scenario import ClassTargets, Slo
from vllm_omni_sched.sim.work import busy_in_all

if TYPE_CHECKING:
    from vllm_omni_sched.sim.output import Spans
    from vllm_omni_sched.sim.scenario.scenario import Scenario


_PER_E = 200  # bins per factor of e: each is half a per cent wide
_LEAST = 1e-6  # seconds; shorter durations count as this
_BLOCK = 4096  # durations that are sorted into bins together


class Histogram:
    """Durations with weights, in bins half a per cent wide; a quantile is off by a quarter of a per cent at most.

    Durations are sorted into bins some thousand at a time, or when a value is read.
    """

    __slots__ = ("_bins", "_count", "_largest", "_new", "_total")

    def __init__(self) -> None:
        self._bins: dict[int, float] = {}
        self._count = 0.0
        self._total = 0.0
        self._largest = 0.0
        self._new: list[tuple[float, float]] = []  # not in their bins yet

    def add(self, seconds: float, weight: float = 1.0) -> None:
        """Add a duration with a weight."""
        new = self._new
        new.append((seconds, weight))
        if len(new) >= _BLOCK:
            self._fold()

    def _fold(self) -> None:
        if not self._new:
            return
        seconds, weights = np.array(self._new).T
        self._new.clear()
        at = (np.log(np.maximum(seconds, _LEAST)) * _PER_E).astype(np.int64)
        first = int(at.min())
        counts = np.bincount(at - first, weights)
        bins = self._bins
        for position in np.flatnonzero(counts).tolist():
            bins[first + position] = bins.get(first + position, 0.0) + float(counts[position])
        # one after the other, as in a loop: a pairwise sum has other last digits
        self._count = float(np.add.accumulate(np.append(self._count, weights))[-1])
        self._total = float(np.add.accumulate(np.append(self._total, seconds * weights))[-1])
        self._largest = max(self._largest, float(seconds.max()))

    def clear(self) -> None:
        """Remove all durations."""
        self._bins.clear()
        self._new.clear()
        self._count = self._total = self._largest = 0.0

    @property
    def count(self) -> float:
        """Return the total weight."""
        self._fold()
        return self._count

    @property
    def total(self) -> float:
        """Return the weighted sum in seconds."""
        self._fold()
        return self._total

    @property
    def largest(self) -> float:
        """Return the longest duration; 0 if there is none."""
        self._fold()
        return self._largest

    @property
    def mean(self) -> float:
        """Return the mean duration; 0 if there is none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """Return the duration that ``part`` of the weight does not exceed; 0 if there is none."""
        left = part * self.count
        for at in sorted(self._bins):
            left -= self._bins[at]
            if left <= 0:
                # int() rounds towards 0, which is up for durations below a second
                return min(math.exp((at - 0.5 if at <= 0 else at + 0.5) / _PER_E), self.largest)
        return self.largest


class Outcome(str, Enum):
    """Outcome of a request."""

    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Record:
    """A request that left. Times are seconds since the start; ``inf``: never.

    ``first``: time of its first token; ``largest_gap``: largest time between two of its tokens, in seconds.
    """

    number: int
    arrival: float
    modality: str
    sla: str
    first: float
    end: float
    output_tokens: int
    largest_gap: float
    outcome: Outcome
    attempts: int = 1

    @property
    def ttft(self) -> float:
        """Return the time to first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Return the mean time per output token after the first; 0 for a single token."""
        return (self.end - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Gaps:
    """Largest step since a mark, to find the largest gap of each request in O(1) per step.

    Steps are numbered from 0. A stack holds stretches between marks that no later one exceeds, and the stretch since
    the last mark, of which only the largest step is kept.

    ``steps``: number so far. ``largest``: largest since the last mark. The owner of the steps updates both.
    """

    __slots__ = ("_marked", "_numbers", "_seconds", "largest", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.largest = 0.0
        self._marked = 0
        self._numbers: list[int] = []  # first step of each stretch
        self._seconds: list[float] = []

    def mark(self) -> int:
        """Return the number of the next step, for `largest_since`."""
        if self.steps > self._marked:
            kept, numbers, largest = self._seconds, self._numbers, self.largest
            while kept and kept[-1] <= largest:
                kept.pop()
                numbers.pop()
            kept.append(largest)
            numbers.append(self._marked)
            self._marked, self.largest = self.steps, 0.0
        return self.steps

    def largest_since(self, step: int) -> float:
        """Return the largest of that step, a return value of `mark`, and all later ones; 0 if there is none."""
        self.mark()
        at = bisect_left(self._numbers, step)
        return self._seconds[at] if at < len(self._seconds) else 0.0


PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Progress = Callable[[float, int], None]
"""Function that is called now and then with the simulated seconds and the events so far."""


class Run(Protocol):
    """Function like `vllm_omni_sched.sim.run.simulate`."""

    def __call__(
        self, scenario: "Scenario", progress: Progress | None = None, spans: "Spans | None" = None
    ) -> "Result":
        """Simulate one scenario."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The number of replicas that can work at one time, by stage."""

    seconds: float
    serving: Mapping[str, int]


@dataclass(slots=True)
class Result:
    """Results of a run, for the requests that arrived after the warm-up.

    ``gaps``: between tokens of these requests.
    ``busy_seconds``: by stage and kind of work, of its servers; ``held_seconds``: of its servers in all, idle or not,
    in the same unit. ``device_seconds``: accelerators held, by stage. All three from the end of the warm-up to the end
    of the run. ``lost``: requests that never left, which is a defect, or cut off by ``drain_seconds``. ``counters``:
    how often a policy gave which reason. ``sources``: source of the costs by stage. ``seconds``: simulated in
    all. ``measured_seconds``: over which the measured requests arrived. ``availability``: of the stages in which
    replicas died, the fraction of their replicas' time in which they could work (``serving``), and the seconds in which
    none could (``seconds_without_any``), after the warm-up. ``operations``: the fraction of the accelerators' capacity
    that was used while requests arrived after the warm-up; None if the costs do not know it.
    """

    name: str
    seed: int
    slo: Slo
    records: list[Record]
    gaps: Histogram
    seconds: float
    measured_seconds: float
    events: int
    steps: int = 0
    lost: int = 0
    busy_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    held_seconds: Mapping[str, float] = field(default_factory=dict)
    device_seconds: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, ClassTargets] = field(default_factory=dict)
    timeline: Sequence[Sample] = ()
    availability: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    operations: float | None = None

    def within(self, records: Iterable[Record] | None = None) -> int:
        """Return the number of requests that met the targets of their class."""
        return sum(self._meets(record) for record in (self.records if records is None else records))

    def _meets(self, record: Record) -> bool:
        return record.outcome is Outcome.DONE and self._late(record) <= 1

    def _late(self, record: Record) -> float:
        """Return the larger ratio of a request's times to its class's targets; above 1 it is not within the SLO."""
        targets: ClassTargets | Slo = self.classes.get(record.sla, self.slo)
        gap = record.tpot if self.slo.itl_of == "mean" else record.largest_gap
        return max(record.ttft / targets.ttft_seconds, gap / targets.itl_seconds)

    @property
    def attainment(self) -> float:
        """Return the fraction of the requests within the SLO; lost and failed ones are not. 0 without requests."""
        asked = len(self.records) + self.lost
        return self.within() / asked if asked else 0.0

    def factors(self) -> list[float]:
        """Return the factor on each request's targets that it would meet; ``inf`` if it failed or was lost."""
        late = [self._late(one) if one.outcome is Outcome.DONE else float("inf") for one in self.records]
        return [float("inf")] * self.lost + late

    def summary(self) -> dict[str, Any]:
        """Return all results in numbers for JSON; None where there is no value."""
        done = [record for record in self.records if record.outcome is Outcome.DONE]
        within, hours = self.within(), sum(self.device_seconds.values()) / 3600
        return {
            **self._of(self.records, self.gaps),
            "lost": self.lost,
            "within_slo": self.attainment if self.records or self.lost else None,
            "goodput_per_second": within / self.measured_seconds,
            "requests_per_second": len(done) / self.measured_seconds,
            "tokens_per_second": sum(record.output_tokens for record in done) / self.measured_seconds,
            "utilisation": {stage: self._utilisation(stage) for stage in self.held_seconds},
            "operations": self.operations,
            "gpu_hours": hours,
            "gpu_hours_per_1000_requests": hours / len(done) * 1000 if done and hours else None,
            "simulated_seconds": self.seconds,
            "events": self.events,
            "steps": self.steps,
            "counters": dict(self.counters),
            **(
                {"availability": {stage: dict(of) for stage, of in self.availability.items()}}
                if self.availability
                else {}
            ),
            "by_class": self._by("sla"),
            "by_modality": self._by("modality"),
        }

    def _of(self, records: Sequence[Record], gaps: Histogram | None) -> dict[str, Any]:
        done = [record for record in records if record.outcome is Outcome.DONE]
        return {
            "requests": len(records),
            "failed": len(records) - len(done),
            "attempts": sum(record.attempts for record in records),
            "within_slo": self.within(records) / len(records) if records else None,
            "ttft_seconds": percentiles([record.ttft for record in done]),
            "itl_seconds": _of_histogram(gaps) if gaps is not None else None,
            "tpot_seconds": percentiles([record.tpot for record in done if record.output_tokens > 1]),
            "latency_seconds": percentiles([record.end - record.arrival for record in done]),
        }

    def _by(self, key: str) -> dict[str, Any]:
        parts: dict[str, list[Record]] = {}
        for record in self.records:
            parts.setdefault(getattr(record, key), []).append(record)
        return {name: self._of(parts[name], None) for name in sorted(parts)}

    def _utilisation(self, stage: str) -> dict[str, float]:
        """Return the fraction of the time that a stage's servers were busy, in all and by kind of work.

        An engine's ``lane`` is the fraction in which its lane encoded, mostly beside steps, whose time it overlaps. The
        part of it without a step is ``lane_alone``, which counts in ``all``.
        """
        held, busy = self.held_seconds[stage], self.busy_seconds.get(stage, {})
        parts = {work: seconds / held if held else 0.0 for work, seconds in busy.items()}
        return {"all": busy_in_all(parts), **parts}


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return P50, P90, P99 by linear interpolation, mean and largest; None without values."""
    if not seconds:
        return dict.fromkeys((*PERCENTILES, "mean", "largest"))
    found = np.quantile(seconds, list(PERCENTILES.values()))
    named: dict[str, float | None] = {name: float(one) for name, one in zip(PERCENTILES, found, strict=True)}
    return {**named, "mean": float(np.mean(seconds)), "largest": float(max(seconds))}


def _of_histogram(gaps: Histogram) -> dict[str, float | None]:
    if not gaps.count:
        return percentiles(())
    named: dict[str, float | None] = {name: gaps.quantile(part) for name, part in PERCENTILES.items()}
    return {**named, "mean": gaps.mean, "largest": gaps.largest}
