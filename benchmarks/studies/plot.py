"""Draw the results of studies, each beside its file: ``python -m benchmarks.studies.plot FILE…``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import style
from vllm_omni_sched.sim.study.report import interval

Record = Mapping[str, Any]
SEARCHED = {
    "max_rate": "Largest rate within the SLO, requests per second",
    "tightest_slo": "Smallest factor on the SLO's times that is met",
    "throughput": "Tokens per second when saturated",
}
_PANEL = 3.2  # inches, the width of a panel


def draw(file: Path) -> Path | None:
    """Draw bars of each system in each case, or what happened over time; None if the result has neither."""
    body = json.loads(file.read_text())
    records = [one for one in body["results"] if not one.get("error")]
    about = f"simulated · {body['scenario']['name']}"
    if records and all("found" in one and ": " in one["variant"] for one in records):
        return by_case(records, about, file.with_name(f"{file.stem}-cases.png"))
    if records and all("over_time" in one for one in records):
        return over_time(
            records, about, body["scenario"]["slo"]["attainment"], file.with_name(f"{file.stem}-over-time.png")
        )
    return None


def by_case(records: Sequence[Record], about: str, path: Path) -> Path:
    """Draw a panel for each case, with a bar and an interval for each system; each has its own scale from 0 on."""
    cases: dict[str, dict[str, list[float]]] = {}
    for one in records:
        case, _, system = one["variant"].rpartition(": ")
        if one["found"]["value"] is not None:
            cases.setdefault(case, {}).setdefault(system, []).append(one["found"]["value"])
    systems = list(dict.fromkeys(one["variant"].rpartition(": ")[2] for one in records))
    columns, most = min(len(cases), 2), max(map(len, cases.values()))
    rows = math.ceil(len(cases) / columns)
    names = 0.2 + 0.083 * max(map(len, systems))  # inches, left of each panel
    width, height = columns * (names + _PANEL) + 0.2, 0.9 + rows * (0.75 + 0.3 * most)
    figure, panels = style.new_figure(width, height, nrows=rows, ncols=columns, squeeze=False)
    figure.subplots_adjust(left=names / width, right=1 - 0.2 / width, top=1 - 1.0 / height, bottom=0.55 / height)
    figure.subplots_adjust(wspace=names / _PANEL, hspace=0.75 / (0.3 * most))
    colours = style.colours_of(systems)
    for axes, (case, found) in zip(panels.flat, cases.items(), strict=False):
        _bars(axes, {system: interval(values) for system, values in found.items()}, colours)
        style.panel_title(axes, case)
    for axes in list(panels.flat)[len(cases) :]:
        axes.set_visible(False)
    style.headline(figure, SEARCHED[records[0]["found"]["kind"]], f"{about}, mean and 95 % interval of the seeds")
    return style.save(figure, path)


def _bars(axes: Any, found: Mapping[str, tuple[float, float]], colours: Mapping[str, str]) -> None:
    most = max(mean + half for mean, half in found.values()) or 1.0
    for at, (system, (mean, half)) in enumerate(found.items()):
        axes.barh(at, mean, color=colours[system], height=0.62)
        if half:
            axes.errorbar(mean, at, xerr=half, color=style.INK, linewidth=1.2, capsize=3)
        label = f"{mean:.3g}" if mean < 1000 else f"{mean:,.0f}"
        axes.text(mean + half + most * 0.02, at, label, va="center", fontsize=9)
    axes.set_yticks(range(len(found)), list(found))
    axes.tick_params(axis="y", length=0, labelcolor=style.INK)
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.2)


def over_time(records: Sequence[Record], about: str, attainment: float, path: Path) -> Path:
    """Draw arrivals, the replicas of each stage whose number differs, and the fraction within the SLO, of one seed."""
    shown = {one["variant"]: one["over_time"] for one in reversed(records)}  # the first seed of each is kept
    shown = {name: shown[name] for name in dict.fromkeys(one["variant"] for one in records)}
    first = next(iter(shown.values()))
    stages = [
        key for key in first if key.startswith("serving ") and any(one[key] != first[key] for one in shown.values())
    ]
    rows = ["requests", *stages, "within_slo"]
    labels = {"requests": "requests / s", "within_slo": "part within SLO"}
    figure, parts = style.new_figure(9.0, 2.0 + 1.9 * len(rows), nrows=len(rows), sharex=True)
    right = max(0.97 - (0.1 + 0.083 * max(map(len, shown))) / 9.0, 0.5)
    figure.subplots_adjust(left=0.09, right=right, top=0.9, bottom=0.07, hspace=0.2)
    for axes, key in zip(parts, rows, strict=True):
        ends = []
        for (name, columns), colour in zip(shown.items(), style.COLOURS, strict=False):
            width = columns["seconds"][1] - columns["seconds"][0]
            x = [at + width / 2 for at in columns["seconds"]]
            y = [math.nan if one is None else one / (width if key == "requests" else 1.0) for one in columns[key]]
            axes.plot(x, y, color=colour, linewidth=1.5)
            ends.append((name, x[-1], next((one for one in reversed(y) if not math.isnan(one)), 0.0), colour))
        axes.set_ylim(0, 1.05 if key == "within_slo" else None)
        axes.set_ylabel(labels.get(key, f"{key.split()[-1]} at work"))
        axes.margins(x=0.01)
        style.label_ends(axes, ends)
    parts[-1].axhline(attainment, color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    parts[-1].set_xlabel("simulated seconds")
    figure.align_ylabels(parts)
    style.headline(figure, "Load, replicas and the part within the SLO over time", about)
    return style.save(figure, path)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        print(draw(Path(word)) or f"{word}: nothing to draw")
