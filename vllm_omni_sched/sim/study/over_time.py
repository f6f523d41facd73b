"""Split a run into bins of time, which show the effects of failures and scaling."""

from typing import Any

import numpy as np

from vllm_omni_sched.sim.measure import Outcome
from vllm_omni_sched.sim.result import Result

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
