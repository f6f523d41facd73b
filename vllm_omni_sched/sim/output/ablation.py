"""Plot an ablation: each mechanism alone, and left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni_sched.sim.output import style
from vllm_omni_sched.sim.study.evaluate import Finding
from vllm_omni_sched.sim.study.options import ALL, ALL_BUT, NONE, ONLY
from vllm_omni_sched.sim.study.spread import groups, values_of

_SHOWN = {
    "goodput_per_second": "goodput, requests/s",
    "itl_p99_seconds": "ITL, P99 in seconds",
    "ttft_p50_seconds": "TTFT, P50 in seconds",
    "ttft_p99_seconds": "TTFT, P99 in seconds",
}
_SEARCHED = {"value": "what was searched for", **{key: _SHOWN[key] for key in list(_SHOWN)[1:]}}
_ALONE, _LEFT_OUT = style.COLOURS[0], style.COLOURS[1]


def mechanisms(findings: Sequence[Finding]) -> list[str]:
    """Return the mechanisms of an ablation that were both alone and left out, in order; [] for other studies."""
    names = {finding.variant for finding in findings if not finding.error}
    if not {NONE, ALL} <= names:
        return []
    alone = [name.removeprefix(ONLY) for name in (one.variant for one in findings) if name.startswith(ONLY)]
    return [name for name in dict.fromkeys(alone) if {ONLY + name, ALL_BUT + name} <= names]


def draw(name: str, findings: Sequence[Finding], searched: bool, path: Path) -> Path:
    """Draw a row for each mechanism and a column for each measure.

    A dot is the mechanism alone, a ring all but it, each the median
    over seeds with their spread; lines mark none and all of them.

    Raises:
        OSError: the file cannot be written.
    """
    rows = mechanisms(findings)
    shown = _SEARCHED if searched else _SHOWN
    found = {group[0].variant: group for group in groups(findings)}
    figure, parts = style.new_figure(12.0, 1.9 + 0.36 * len(rows), ncols=len(shown), sharey=True)
    style.layout(figure, right=0.98, left=0.05 + 0.0072 * max(len(row) for row in rows), above=1.25)
    figure.subplots_adjust(wspace=0.08)
    for axes, (measured, label) in zip(parts, shown.items(), strict=True):
        for variant, dashes in ((NONE, (0, (2, 3))), (ALL, "solid")):
            if values := values_of(found[variant], measured):
                axes.axvline(values[len(values) // 2], color=style.MUTED, linewidth=1.2, linestyle=dashes)
        for at, row in enumerate(rows):
            _dot(axes, at - 0.14, values_of(found[ONLY + row], measured), _ALONE, filled=True)
            _dot(axes, at + 0.14, values_of(found[ALL_BUT + row], measured), _LEFT_OUT, filled=False)
        style.panel_title(axes, label)
        axes.set_xlim(0, 1.06 * axes.dataLim.x1)  # half a dot of space
        axes.tick_params(axis="y", length=0, labelcolor=style.INK)
    parts[0].set_yticks(range(len(rows)), rows)
    parts[0].invert_yaxis()
    _key(figure)
    style.headline(figure, "Each mechanism alone, and left out", name)
    return style.save(figure, path)


def _dot(axes: Any, at: float, values: Sequence[float], colour: str, filled: bool) -> None:
    if not values:
        return
    axes.plot([values[0], values[-1]], [at, at], color=colour, linewidth=1.4)
    face = colour if filled else "white"
    axes.plot([values[len(values) // 2]], [at], "o", markersize=6, color=colour, markerfacecolor=face)


def _key(figure: Any) -> None:
    """Draw the key of the marks in a line below the headline."""
    height = 1 - 0.66 / figure.get_figheight()
    marks = (
        ("●", _ALONE, "alone"),
        ("○", _LEFT_OUT, "all but it"),
        ("┊", style.MUTED, "none"),
        ("│", style.MUTED, "all"),
    )
    for at, (mark, colour, label) in enumerate(marks):
        figure.text(0.02 + 0.09 * at, height, mark, color=colour, fontsize=11, va="top")
        figure.text(0.035 + 0.09 * at, height, label, color=style.INK, fontsize=9.5, va="top")
