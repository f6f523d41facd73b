"""Plot the results of studies."""

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from vllm_omni_sched.sim.output import ablation, bars, style
from vllm_omni_sched.sim.study.evaluate import PARTS, Finding
from vllm_omni_sched.sim.study.options import Search
from vllm_omni_sched.sim.study.plan import Study
from vllm_omni_sched.sim.study.spread import groups, values_of

_LEFT = PARTS.index(0.01)  # where the axis of a distribution begins
_FEW = 2  # values of a swept key: a line through so few would suggest more than is known
_LEAST = 1e-6  # seconds; a log axis has no 0
_SWEPT = {
    "ttft_p99_seconds": "TTFT, P99 in seconds",
    "itl_p99_seconds": "inter-token latency, P99 in seconds",
    "within_slo": "part within the SLO",
    "goodput_per_second": "goodput, requests per second",
}
_SEARCHED = {
    "max_rate": "largest rate within the SLO, requests per second",
    "tightest_slo": "smallest factor on the SLO's times that is met",
    "throughput": "tokens per second when saturated",
}


def draw(study: Study, findings: Sequence[Finding], folder: Path, stem: str) -> list[Path]:
    """Draw all plots for which there is data, and return their paths.

    Raises:
        OSError: a file cannot be written.
    """
    well = [group[0] for group in groups(findings)]
    intervals = ", mean and 95 % interval of the seeds" if study.repeats > 1 else ""
    label = searched_label(study.search) if study.search is not None else _SWEPT["goodput_per_second"]
    head = label[0].upper() + label[1:], f"{study.base.name}{intervals}"
    measured = "value" if study.search is not None else "goodput_per_second"
    if study.systems:
        return [bars.by_case(findings, study.systems, measured, head, folder / f"{stem}-cases.png")] if well else []
    if ablation.mechanisms(well) and not any(one.values for one in well):
        return [ablation.draw(study.base.name, findings, study.search is not None, folder / f"{stem}-ablation.png")]
    drawn: list[Path] = []
    for name, title in (("ttft", "Time to first token"), ("itl", "Time between tokens")):
        if any(f"{name}_seconds" in one.curves for one in well):
            drawn.append(_cdf(study, well, f"{name}_seconds", title, folder / f"{stem}-{name}.png"))
    if study.single and well and well[0].timeline:
        drawn.append(_timeline(study, well[0], folder / f"{stem}-timeline.png"))
    if study.changes and len(well) > 1 and all(one.over_time for one in well):
        drawn.append(_over_time(study, well, folder / f"{stem}-over-time.png"))
    swept = [key for key in (well[0].values if well else {}) if len({repr(one.values[key]) for one in well}) > 1]
    numbers = [key for key in swept if all(isinstance(one.values[key], (int, float)) for one in well)]
    if numbers and (study.search is None or len({one.values[numbers[0]] for one in well}) > _FEW):
        wanted = {"value": searched_label(study.search)} if study.search is not None else _SWEPT
        drawn.append(_sweep(study, findings, numbers[0], wanted, folder / f"{stem}-sweep.png"))
    elif study.search is not None and well:
        named = [(_name(group[0]), group) for group in groups(findings)]
        drawn.append(bars.one_for_each(named, measured, head, folder / f"{stem}-search.png"))
    return drawn


def searched_label(search: Search) -> str:
    """Return what the value of a search is; one by another key than the rate has that key's unit."""
    if search.kind == "max_rate" and search.key != "workload.rate":
        return f"largest {search.key} within the SLO"
    return _SEARCHED[search.kind]


def _cdf(study: Study, findings: Sequence[Finding], key: str, title: str, path: Path) -> Path:
    figure, axes = style.new_figure()
    shown = _shown([one for one in findings if key in one.curves])
    style.layout(figure, right=style.room_for(figure, [_name(one) for one in shown]))
    ends = []
    for one, colour in zip(shown, style.COLOURS, strict=False):
        axes.plot(one.curves[key], PARTS, color=colour, linewidth=1.8)
        ends.append((_name(one), one.curves[key][-1], 1.0, colour))
    axes.set_xscale("log")
    target = study.base.slo.ttft_seconds if key == "ttft_seconds" else study.base.slo.itl_seconds
    furthest = max(target, *(one.curves[key][-1] for one in shown))
    nearest = min(one.curves[key][_LEFT] for one in shown)
    axes.set_xlim(max(nearest / 1.5, _LEAST), furthest * 1.3)
    axes.set_ylim(0, 1.0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("part of requests" if key == "ttft_seconds" else "part of gaps")
    _slo_line(axes, target)
    _plain(axes.xaxis)
    style.label_ends(axes, _apart(axes, ends))
    left = f" ({len(shown)} of {len(findings)} points)" if len(shown) < len(findings) else ""
    style.headline(figure, title, f"{study.base.name}{left}")
    return style.save(figure, path)


def _shown(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Return all findings, or if they are too many to tell apart, those at the middle values of the sweep."""
    if len(findings) <= style.MOST_LINES:
        return findings
    swept = [one.values for at, one in enumerate(findings) if one.values not in [two.values for two in findings[:at]]]
    middle = swept[len(swept) // 2]
    return [one for one in findings if one.values == middle][: style.MOST_LINES]


def _apart(axes: Any, ends: Sequence[tuple[str, float, float, str]]) -> list[tuple[str, float, float, str]]:
    """Return label positions for lines that all end at the top: from the top down, in the order of their ends."""
    x = axes.get_xlim()[1]
    ordered = sorted(ends, key=lambda end: end[1])
    return [(name, x, 0.97 - 0.06 * at, colour) for at, (name, _, _, colour) in enumerate(ordered)]


def _slo_line(axes: Any, seconds: float) -> None:
    axes.axvline(seconds, color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "SLO", (seconds, 0.02), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points",
        color=style.MUTED, fontsize=9,
    )  # fmt: skip


def _timeline(study: Study, finding: Finding, path: Path) -> Path:
    figure, parts = style.new_figure(height=6.0, nrows=3, sharex=True)
    style.layout(figure)
    figure.subplots_adjust(hspace=0.18)
    at = [one["seconds"] for one in finding.timeline]
    names = list(finding.timeline[0]["queued"])
    rows = {"queued": "requests", "utilisation": "busy, part", "replicas": "replicas"}
    for axes, (key, label) in zip(parts, rows.items(), strict=True):
        ends = []
        for name, colour in zip(names, cycle(style.COLOURS), strict=False):
            values = [one[key][name] for one in finding.timeline]
            axes.plot(at, values, color=colour, linewidth=1.4, drawstyle="steps-post" if key == "replicas" else None)
            ends.append((name, at[-1], values[-1], colour))
        axes.set_ylim(0, 1.05 if key == "utilisation" else None)
        axes.set_ylabel(label)
        axes.margins(x=0.01)
        style.label_ends(axes, ends)
    parts[-1].set_xlabel("simulated seconds")
    figure.align_ylabels(parts)
    style.headline(figure, "Requests, utilisation and replicas by stage", study.base.name)
    return style.save(figure, path)


def _sweep(study: Study, findings: Sequence[Finding], key: str, wanted: dict[str, str], path: Path) -> Path:
    """Draw a line for each variant (and each value of other swept keys), with the spread over seeds as a band."""
    many = len(wanted) > 1
    figure, parts = style.new_figure(
        11.0 if many else 8.0, 7.5 if many else 4.5, nrows=2 if many else 1, ncols=2 if many else 1, squeeze=False
    )
    lines: dict[str, list[list[Finding]]] = {}
    for group in groups(findings):
        lines.setdefault(_name(group[0], key), []).append(group)
    right = style.room_for(figure, list(lines))
    style.layout(figure, right=right, left=0.07 if many else 0.09, above=1.05)
    if many:
        figure.subplots_adjust(wspace=0.2 + 2.2 * (1 - right), hspace=0.32)
    for axes, (name, label) in zip(parts.flat, wanted.items(), strict=True):
        ends = []
        for (line, points), colour in zip(lines.items(), cycle(style.COLOURS), strict=False):
            points = sorted(points, key=lambda group: group[0].values[key])
            band = [(group[0].values[key], values) for group in points if (values := values_of(group, name))]
            if not band:
                continue
            x = [at for at, _ in band]
            middle = [values[len(values) // 2] for _, values in band]
            axes.plot(x, middle, color=colour, linewidth=1.8, marker="o", markersize=4)
            axes.fill_between(x, [v[0] for _, v in band], [v[-1] for _, v in band], color=colour, alpha=0.15, lw=0)
            ends.append((line, x[-1], middle[-1], colour))
        if name.endswith("p99_seconds") and ends:
            axes.set_yscale("log")
            _plain(axes.yaxis)
        else:
            axes.set_ylim(0, 1.05 if name == "within_slo" else None)
        style.panel_title(axes, label)
        axes.set_xlabel(key)
        style.label_ends(axes, ends)
    style.headline(figure, f"What changes with {key}", study.base.name)
    return style.save(figure, path)


def _name(finding: Finding, but: str = "") -> str:
    """Return a label that distinguishes a point from others; keys are shortened to their last part."""
    parts = [finding.variant] if finding.variant else []
    parts += [f"{key.split('.')[-1]} {value}" for key, value in finding.values.items() if key != but]
    return ", ".join(parts)


def _plain(axis: Any) -> None:
    """Format numbers of a log axis plainly: 0.1, not 10⁻¹."""
    from matplotlib.ticker import FuncFormatter

    plain: Callable[[float, int], str] = lambda value, _: f"{value:g}"  # noqa: E731 - matplotlib wants two arguments
    axis.set_major_formatter(FuncFormatter(plain))


def _over_time(study: Study, findings: Sequence[Finding], path: Path) -> Path:
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
            x, y = _binned(one.over_time, key)
            axes.plot(x, y, color=colour, linewidth=1.5)
            ends.append((name, x[-1], _last(y), colour))
        axes.set_ylim(0, 1.05 if key == "within_slo" else None)
        axes.set_ylabel(_row_label(key))
        axes.margins(x=0.01)
        style.label_ends(axes, ends)
    parts[-1].axhline(study.base.slo.attainment, color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    parts[-1].set_xlabel("simulated seconds")
    figure.align_ylabels(parts)
    style.headline(figure, "Load, replicas and the part within the SLO over time", study.base.name)
    return style.save(figure, path)


def _row_label(key: str) -> str:
    return {"requests": "requests / s", "within_slo": "part within SLO"}.get(key, f"{key.split()[-1]} at work")


def _differ(findings: Sequence[Finding], key: str) -> bool:
    return any(one.over_time[key] != findings[0].over_time[key] for one in findings)


def _binned(columns: dict[str, list[Any]], key: str) -> tuple[list[float], list[float]]:
    seconds = columns["seconds"]
    width = seconds[1] - seconds[0]
    scale = 1 / width if key == "requests" else 1.0
    return [one + width / 2 for one in seconds], [math.nan if y is None else y * scale for y in columns[key]]


def _last(values: Sequence[float]) -> float:
    return next((one for one in reversed(values) if not math.isnan(one)), 0.0)
