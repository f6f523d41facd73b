"""Plot variants over time: arrivals, serving replicas, and the fraction within the SLO."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni_sched.sim.output import style
from vllm_omni_sched.sim.study import Finding, Study


def bins(study: Study, findings: Sequence[Finding], path: Path) -> Path:
    """Draw a row for arrivals, one for the replicas of each stage that differ, and one for the fraction within the SLO.

    Raises:
        OSError: the file cannot be written.
    """
    shown = findings[: style.MOST_LINES]
    stages = [key for key in shown[0].over_time if key.startswith("serving ") and _differ(shown, key)]
    rows = ["requests", *stages, "within_slo"]
    figure, parts = style.new_figure(9.0, 2.0 + 1.9 * len(rows), nrows=len(rows), sharex=True)
    names = [one.variant or one.label for one in shown]
    style.layout(figure, right=style.room_for(figure, names))
    figure.subplots_adjust(hspace=0.2)
    for axes, key in zip(parts, rows, strict=True):
        lines = [(one, name) for one, name in zip(shown, names, strict=True)]
        if key == "requests" and not _differ(shown, key):
            lines = [(shown[0], "")]
        ends = []
        for (one, name), colour in zip(lines, style.COLOURS, strict=False):
            x, y = _line(one.over_time, key)
            axes.plot(x, y, color=colour, linewidth=1.5)
            ends.append((name, x[-1], _last(y), colour))
        axes.set_ylim(0, 1.05 if key == "within_slo" else None)
        axes.set_ylabel(_label(key))
        axes.margins(x=0.01)
        style.label_ends(axes, ends)
    parts[-1].axhline(study.base.slo.attainment, color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    parts[-1].set_xlabel("simulated seconds")
    figure.align_ylabels(parts)
    style.headline(figure, "Load, replicas and the part within the SLO over time", study.base.name)
    return style.save(figure, path)


def _label(key: str) -> str:
    return {"requests": "requests / s", "within_slo": "part within SLO"}.get(key, f"{key.split()[-1]} at work")


def _differ(findings: Sequence[Finding], key: str) -> bool:
    return any(one.over_time[key] != findings[0].over_time[key] for one in findings)


def _line(columns: dict[str, list[Any]], key: str) -> tuple[list[float], list[float]]:
    seconds = columns["seconds"]
    width = seconds[1] - seconds[0]
    scale = 1 / width if key == "requests" else 1.0
    return [one + width / 2 for one in seconds], [math.nan if y is None else y * scale for y in columns[key]]


def _last(values: Sequence[float]) -> float:
    return next((one for one in reversed(values) if not math.isnan(one)), 0.0)
