"""Estimate how fast the machine was during a measurement. Pure.

A shared machine is not equally fast at all times: the same load takes up to twice as long minutes later. One reference
load runs before and after each wave; what it takes there, as a part of what it takes in the mean, is the wave's pace.
Calibration is for a pace of 1, and a wave is simulated at its own. (The engine's rounds: as a part of what the
calibration says, and of steps alone.)
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.sim_fidelity.pipeline_fit import gaps

REFERENCE = "reference"


def with_paces(waves: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the waves with their ``pace``: from the references before and after; that of a reference is its own.

    Args:
        waves: in the order in which they were measured, of one pipeline; the first and the last are references.

    Raises:
        ValueError: there is none before, or none after.
    """
    takes = [statistics.fmean(gaps(wave)) if wave["name"] == REFERENCE else None for wave in waves]
    if not takes or takes[0] is None or takes[-1] is None:
        raise ValueError("a reference load must be the first and the last that is measured")
    usual = statistics.fmean(one for one in takes if one is not None)
    found = []
    for at, (wave, own) in enumerate(zip(waves, takes, strict=True)):
        around = (_next(takes[:at][::-1]), _next(takes[at:])) if own is None else (own,)
        found.append({**wave, "pace": statistics.fmean(around) / usual})
    return found


def _next(takes: Sequence[float | None]) -> float:
    """Return the mean of the first values in a row that are not None."""
    there = itertools.dropwhile(lambda one: one is None, takes)
    row = itertools.takewhile(lambda one: one is not None, there)
    return statistics.fmean(one for one in row if one is not None)


def at_usual_pace(wave: dict[str, Any]) -> dict[str, Any]:
    """Return the wave as it would have been at a pace of 1."""
    pace = wave["pace"]
    told = [
        {**one, "outputs": [seconds / pace for seconds in one["outputs"]], "end": one["end"] / pace}
        for one in wave["told"]
    ]
    cpu = {process: seconds / pace for process, seconds in wave["cpu_seconds"].items()}
    return {**wave, "told": told, "seconds": wave["seconds"] / pace, "cpu_seconds": cpu}


_NO_SECONDS = {"steadiness", "lane_slowdown", "residuals", "source"}


def costs_at(pace: float, costs: Any) -> Any:
    """Return fitted costs, as in a calibration file, at that pace: all seconds are multiplied by it."""
    if isinstance(costs, dict):
        return {key: value if key in _NO_SECONDS else costs_at(pace, value) for key, value in costs.items()}
    if isinstance(costs, list):
        return [costs_at(pace, value) for value in costs]
    return costs * pace if isinstance(costs, float) else costs
