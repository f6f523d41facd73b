"""Evaluate one point of a study, or search at it; in all, and by bins of time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.measure import Outcome, Progress, Result, Run
from vllm_omni_sched.sim.output import Spans
from vllm_omni_sched.sim.study.options import Search
from vllm_omni_sched.sim.study.plan import Point, value_at


@dataclass(frozen=True)
class Edge:
    """Point at which a condition stops to hold.

    ``holds``: the largest value at which it did, 0 if at none; ``fails``: the smallest above at which it did not, None
    if at none; ``monotone``: no tried value that held lies above one that did not.
    """

    holds: float
    fails: float | None
    monotone: bool
    tried: tuple[tuple[float, bool], ...]


def largest(holds: Callable[[float], bool], start: float, precision: float, doublings: int, step: float = 2.0) -> Edge:
    """Return the largest value that holds, by steps and bisection.

    1. From ``start`` it goes up by factors of ``step`` while the value holds. If ``step`` is 2 or more, it stops
       when a value and the next one both fail: one failure may be chance, which a higher rate that holds shows.
    2. If none of these holds, it goes down until a value holds: by ``step``, then by 2 if that is more.
    3. Between the largest that held and the next that failed it bisects, by the geometric mean, until they are within
       ``precision`` of each other.

    Args:
        holds: called once for each value.
        precision: relative precision of the answer.
        doublings: most steps up, and most steps down.
    """
    asked: dict[float, bool] = {}

    def ask(value: float) -> bool:
        if value not in asked:
            asked[value] = holds(value)
        return asked[value]

    value = start
    for _ in range(doublings):
        if not ask(value) and (step < 2 or not ask(step * value)):
            break
        value *= step
    if not any(asked.values()):
        value, down = start, step
        for _ in range(doublings):
            value /= down
            if ask(value):
                break
            down = min(down * down, 2.0) if step < 2 else step
    low = max((one for one, held in asked.items() if held), default=0.0)
    above = [one for one, held in asked.items() if not held and one > low]
    high = min(above, default=None)
    while low and high is not None and high > low * (1 + precision):
        middle = math.sqrt(low * high)
        if ask(middle):
            low = middle
        else:
            high = middle
    monotone = not any(held and not asked[less] for one, held in asked.items() for less in asked if less < one)
    return Edge(low, high, monotone, tuple(sorted(asked.items())))


def needed(factors: Sequence[float], attainment: float) -> float:
    """Return the smallest factor that suffices for that fraction of the requests; ``inf`` without requests."""
    if not factors:
        return math.inf
    ordered = sorted(factors)
    return ordered[max(math.ceil(attainment * len(ordered) - 1e-9) - 1, 0)]


BINS = 60


def over_time(result: Result, begin: float, end: float, bins: int = BINS) -> dict[str, list[Any]]:
    """Return columns with one value for each bin of arrivals from ``begin`` to ``end``, both in seconds.

    ``seconds``: begin of the bin; ``requests`` that arrived in it; of them, the fraction ``within_slo``, ``failed``,
    and the 99th percentile of ``ttft_seconds`` (None without any); ``serving STAGE``: mean replicas that could
    work.
    """
    width = (end - begin) / bins
    parts: list[list[Any]] = [[] for _ in range(bins)]
    for record in result.records:
        at = int((record.arrival - begin) / width)
        if 0 <= at < bins:
            parts[at].append(record)
    done = [[one.ttft for one in part if one.outcome is Outcome.DONE] for part in parts]
    columns: dict[str, list[Any]] = {
        "seconds": [round(begin + at * width, 3) for at in range(bins)],
        "requests": [len(part) for part in parts],
        "within_slo": [round(result.within(part) / len(part), 4) if part else None for part in parts],
        "failed": [len(part) - len(times) for part, times in zip(parts, done, strict=True)],
        "ttft_p99_seconds": [round(float(np.quantile(times, 0.99)), 3) if times else None for times in done],
    }
    for stage in result.timeline[0].serving if result.timeline else ():
        columns[f"serving {stage}"] = _mean_of(result, stage, begin, width, bins)
    return columns


def _mean_of(result: Result, stage: str, begin: float, width: float, bins: int) -> list[float | None]:
    seen: list[list[int]] = [[] for _ in range(bins)]
    for sample in result.timeline:
        at = int((sample.seconds - begin) // width)
        if 0 <= at < bins:
            seen[at].append(sample.serving[stage])
    return [round(sum(each) / len(each), 2) if each else None for each in seen]


@dataclass
class Finding:
    """Results at a point.

    ``summary``: of its run; for a search, of its final run. ``found``: result of the search, with ``value`` and
    how it was found. ``over_time``: columns of bins. ``sources``: of costs. ``runs``: number of runs. ``error``: why
    the rest is missing. ``tuned``: the choices that were made, and how.
    """

    variant: str
    values: Mapping[str, Any]
    seed: int
    label: str
    summary: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] | None = None
    over_time: dict[str, list[Any]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    runs: int = 0
    error: str = ""
    tuned: Mapping[str, Any] | None = None


def evaluate(
    point: Point, search: Search | None, run: Run, progress: Progress | None = None, spans: Spans | None = None
) -> Finding:
    """Run a point, or search at it.

    Raises:
        ConfigError: a scenario on the way is impossible.
    """
    finding = Finding(point.variant, dict(point.values), point.seed, point.label)

    def one(overrides: Mapping[str, Any]) -> Result:
        finding.runs += 1
        return run(point.scenario(overrides), progress, spans)

    if search is None:
        result = one({})
        scenario = point.scenario()
        finding.over_time = over_time(result, scenario.warm_up_seconds, scenario.duration_seconds)
    else:
        finding.found, result = _SEARCHES[search.kind](point, search, one)
    finding.summary = result.summary()
    finding.sources = dict(result.sources)
    return finding


def score(point: Point, search: Search | None, run: Run) -> float | None:
    """Return the score of a point for comparing choices; None if the point is impossible.

    It is the value searched for, or the fraction within the SLO, and of equals the lower P99 TTFT.
    """
    try:
        finding = evaluate(point, search, run)
    except ConfigError:
        return None
    if search is None:
        late = float(finding.summary["ttft_seconds"]["p99"] or finding.summary["simulated_seconds"])
        return float(finding.summary["within_slo"] or 0.0) - _TIE * late / (1 + late)
    assert finding.found is not None
    value = finding.found["value"]
    if search.kind == "tightest_slo":
        return -math.inf if value is None else -float(value)
    return float(value)


_TIE = 1e-6  # below the effect of one request in a million
_One = Callable[[Mapping[str, Any]], Result]


def _max_rate(point: Point, search: Search, one: _One) -> tuple[dict[str, Any], Result]:
    """Search the largest value at which the SLO is met; whole numbers are used if the key has one."""
    attained: dict[float, float] = {}
    whole = isinstance(value_at(point, search.key), int) and search.key != "workload.rate"
    kept: list[tuple[bool, float, Result]] = []  # at most one: results are large
    attainment = point.scenario().slo.attainment

    def holds(value: float) -> bool:
        result = one({search.key: max(round(value), 1) if whole else value})
        attained[value] = result.attainment
        held = result.attainment >= attainment
        # the largest that holds; while none does, the smallest
        if not kept or (held, value if held else -value) > (kept[0][0], kept[0][1] if kept[0][0] else -kept[0][1]):
            kept[:] = [(held, value, result)]
        return held

    start = point.start or search.start or float(value_at(point, search.key))
    edge = largest(holds, start, search.precision, search.doublings, search.step)
    found = {
        "kind": search.kind,
        "key": search.key,
        "value": _crossing(edge, attained, attainment),
        "holds": edge.holds,
        "fails_at": edge.fails,
        "precision": search.precision,
        "monotone": edge.monotone,
        "tried": [{"value": value, "within_slo": attained[value]} for value, _ in edge.tried],
    }
    return found, kept[0][2]


def _crossing(edge: Edge, attained: Mapping[float, float], attainment: float) -> float:
    """Return where the fraction within the SLO falls below the required one.

    It is interpolated between the last value that holds and the first one that fails, whose distance is the search's
    precision.
    """
    low, high = edge.holds, edge.fails
    if not low or high is None or attained[low] <= attained[high]:
        return low
    return low + (high - low) * (attained[low] - attainment) / (attained[low] - attained[high])


def _tightest_slo(point: Point, search: Search, one: _One) -> tuple[dict[str, Any], Result]:
    slo = point.scenario().slo
    load = {} if search.load == 1 else {search.key: search.load * float(value_at(point, search.key))}
    result = one(load)
    best = needed(result.factors(), slo.attainment)
    met = math.isfinite(best)
    found = {
        "kind": search.kind,
        "value": best if met else None,
        "ttft_seconds": best * slo.ttft_seconds if met else None,
        "itl_seconds": best * slo.itl_seconds if met else None,
    }
    return found, result


def _throughput(point: Point, search: Search, one: _One) -> tuple[dict[str, Any], Result]:
    """Measure the output per second in the middle half of the time in which requests arrive.

    If the scenario sets `requests`, a quarter of them measure the capacity, and the others arrive
    at 1.5 times that: a slow system is measured on as many requests as a fast one.
    """
    rate = float(value_at(point, search.key)) * search.factor
    wanted = point.scenario().requests
    if wanted is not None:
        pilot, _ = _saturate(point, search.key, rate, {"requests": max(wanted // 4, 1)}, one)
        if pilot["saturated"] and pilot["requests_per_second"]:
            rate = _BEYOND * pilot["requests_per_second"]
    found, result = _saturate(point, search.key, rate, {}, one)
    return {"kind": search.kind, "key": search.key, **found}, result


_BEYOND = 1.5  # of the capacity


def _saturate(point: Point, key: str, rate: float, more: Mapping[str, Any], one: _One) -> tuple[dict[str, Any], Result]:
    overrides = {key: rate, "warm_up_seconds": 0.0, "drain_seconds": 0.0, **more}
    result = one(overrides)
    seconds = point.scenario(overrides).duration_seconds
    begin, end = seconds / 4, seconds * 3 / 4
    ended = [record for record in result.records if record.outcome is Outcome.DONE and begin <= record.end < end]
    waiting = result.lost + sum(record.arrival < end <= record.end for record in result.records)
    found = {
        "value": sum(record.output_tokens for record in ended) / (end - begin),
        "requests_per_second": len(ended) / (end - begin),
        "requests": len(ended),
        "offered": rate,
        "saturated": waiting > 0.05 * (len(result.records) + result.lost),
    }
    return found, result


_SEARCHES: dict[str, Callable[[Point, Search, _One], tuple[dict[str, Any], Result]]] = {
    "max_rate": _max_rate,
    "tightest_slo": _tightest_slo,
    "throughput": _throughput,
}
