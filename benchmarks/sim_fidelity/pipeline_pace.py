"""How fast the machine was, while each wave was measured. Pure.

A shared machine is not equally fast at all times: the same load takes up to twice as long minutes later. One reference
load runs before and after each wave; what it takes there, as a part of what it takes in the mean, is the wave's pace.
Calibration is for a pace of 1, and a wave is simulated at its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.sim_fidelity.pipeline_fit import gaps

REFERENCE = "reference"


def with_paces(waves: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are no references, with their ``pace``: by the last reference before and the first after each.

    Args:
        waves: in the order in which they were measured, of one pipeline; the first and the last are references.
    """
    takes = [statistics.fmean(gaps(wave)) if wave["name"] == REFERENCE else None for wave in waves]
    usual = statistics.fmean(one for one in takes if one is not None)
    found = []
    for at, wave in enumerate(waves):
        if takes[at] is None:
            before = next(one for one in reversed(takes[:at]) if one is not None)
            after = next(one for one in takes[at:] if one is not None)
            found.append({**wave, "pace": (before + after) / 2 / usual})
    return found


def at_usual_pace(wave: dict[str, Any]) -> dict[str, Any]:
    """The wave as it would have been at a pace of 1."""
    pace = wave["pace"]
    told = [
        {**one, "outputs": [seconds / pace for seconds in one["outputs"]], "end": one["end"] / pace}
        for one in wave["told"]
    ]
    cpu = {who: seconds / pace for who, seconds in wave["cpu_seconds"].items()}
    return {**wave, "told": told, "seconds": wave["seconds"] / pace, "cpu_seconds": cpu}


def costs_at(pace: float, costs: Any) -> Any:
    """A stage's fitted costs at that pace: all seconds times it."""
    step = {key: value * pace for key, value in costs["step"].items() if isinstance(value, float)}
    kept = {key: value for key, value in costs["step"].items() if key not in step}
    front = {key: value * pace for key, value in costs["frontend"].items() if isinstance(value, float)}
    return {
        **costs,
        "step": step | kept,
        "frontend": costs["frontend"] | front,
        "answer_seconds": costs["answer_seconds"] * pace,
    }
