"""Plot bars with error bars: of each point, or of each system in each case."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni_sched.sim.output import style
from vllm_omni_sched.sim.study.evaluate import Finding
from vllm_omni_sched.sim.study.spread import groups, interval, values_of

_PANEL = 3.2  # inches, the width of a panel
Bar = tuple[str, float, float]
"""Name, mean over seeds, and half of its 95 % interval."""


def one_for_each(
    named: Sequence[tuple[str, Sequence[Finding]]], measured: str, head: tuple[str, str], path: Path
) -> Path:
    """Draw a bar for each point."""
    bars = [bar for name, group in named if (bar := _bar(name, group, measured)) is not None]
    figure, axes = style.new_figure(height=1.5 + 0.42 * max(len(bars), 2))
    left = min(0.45, 0.03 + 0.0105 * max((len(name) for name, _, _ in bars), default=4))
    style.layout(figure, right=0.94, left=left)
    _draw(axes, bars, [style.COLOURS[0]] * len(bars))
    style.headline(figure, head[0], head[1])
    return style.save(figure, path)


def by_case(
    findings: Sequence[Finding], systems: Sequence[str], measured: str, head: tuple[str, str], path: Path
) -> Path:
    """Draw a panel for each case, with a bar for each system; every panel has its own scale, which begins at 0."""
    cases: dict[str, list[Bar]] = {}
    for group in groups(findings):
        case, system = split_name(group[0].variant, systems)
        swept = [f"{key.split('.')[-1]} {value}" for key, value in group[0].values.items()]
        bar = _bar(system, group, measured)
        if bar is not None:
            cases.setdefault(", ".join([case, *swept]), []).append(bar)
    columns = 2 if len(cases) > 1 else 1
    rows = math.ceil(len(cases) / columns)
    most = max((len(bars) for bars in cases.values()), default=1)
    height = 0.9 + rows * (0.75 + 0.3 * most)
    names = 0.2 + 0.083 * max((len(system) for system in systems), default=4)  # inches, left of each panel
    width = columns * (names + _PANEL) + 0.2
    figure, panels = style.new_figure(width, height, nrows=rows, ncols=columns, squeeze=False)
    style.layout(figure, left=names / width, right=1 - 0.2 / width, above=1.0)
    figure.subplots_adjust(wspace=names / _PANEL, hspace=0.75 / (0.3 * most))
    colours = style.colours_of(systems)
    for axes, (case, bars) in zip(panels.flat, cases.items(), strict=False):
        _draw(axes, bars, [colours[name] for name, _, _ in bars])
        style.panel_title(axes, case)
    for axes in list(panels.flat)[len(cases) :]:
        axes.set_visible(False)
    style.headline(figure, head[0], head[1])
    return style.save(figure, path)


def split_name(variant: str, systems: Sequence[str]) -> tuple[str, str]:
    """Split a variant's name into case and system."""
    for system in systems:
        if variant.endswith(f": {system}"):
            return variant[: -len(system) - 2], system
    return "", variant


def _bar(name: str, group: Sequence[Finding], measured: str) -> Bar | None:
    values = values_of(group, measured)
    return (name, *interval(values)) if values else None


def _draw(axes: Any, bars: Sequence[Bar], colours: Sequence[str]) -> None:
    most = max((mean + half for _, mean, half in bars), default=1.0) or 1.0
    for at, ((_, mean, half), colour) in enumerate(zip(bars, colours, strict=True)):
        axes.barh(at, mean, color=colour, height=0.62)
        if half:
            axes.errorbar(mean, at, xerr=half, color=style.INK, linewidth=1.2, capsize=3)
        label = f"{mean:.3g}" if mean < 1000 else f"{mean:,.0f}"
        axes.text(mean + half + most * 0.02, at, label, va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.tick_params(axis="y", length=0, labelcolor=style.INK)
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.2)
