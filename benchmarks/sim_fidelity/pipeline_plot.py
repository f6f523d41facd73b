"""Plot distributions of the pipeline's TTFT, ITL and end-to-end latency, measured and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import style
from benchmarks.sim_fidelity.pipeline_compare import ALL, MEASURES, Pair, grouped, values


def draw(path: Path, pairs: Sequence[Pair], records: Sequence[dict[str, Any]]) -> Path:
    """Draw a row for each variant and each of its loads, with the errors of P50 and P99 in the titles."""
    groups = grouped(pairs)
    height = 1.0 + 2.5 * len(groups)
    figure, axes = style.new_figure(12.5, height, nrows=len(groups), ncols=len(MEASURES), squeeze=False)
    parts = [i / 500 for i in range(1, 500)]
    for row, ((variant, arrivals, load), own) in zip(axes, groups, strict=True):
        where = f"{variant}, all" if arrivals == ALL else f"{variant}, {arrivals} {load:g}"
        for axis, name in zip(row, MEASURES, strict=True):
            real, simulated = values(own, name)
            off = [
                f"{r['measure'].split()[-1]} {100 * r['off']:+.0f} %"
                for r in records
                if (r["variant"], r["arrivals"], r["load"]) == (variant, arrivals, load)
                and r["measure"].startswith(name)
            ]
            title = f"{where}: {name}, ms\n{', '.join(off)}"
            cdf(axis, title, real, points(sorted(simulated), parts), parts)
    axes[0][0].legend(frameon=False, loc="lower right")
    inch = 1 / height
    title = "The pipeline, and the simulator on the same arrivals"
    quiet = "Text to text on two cores, two replicas of the second stage; costs calibrated on other loads"
    figure.text(0.02, 1 - 0.1 * inch, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.02, 1 - 0.38 * inch, quiet, fontsize=9.5, color=style.MUTED, va="top")
    figure.subplots_adjust(left=0.05, right=0.99, top=1 - 0.95 * inch, bottom=0.4 * inch, hspace=0.6)
    return style.save(figure, path, dpi=80)  # many rows


def cdf(axis: Any, title: str, measured: list[float], simulated: list[float], parts: list[float]) -> None:
    style.panel_title(axis, title)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.xaxis.set_minor_formatter("")
    real = points(sorted(measured), parts)
    axis.plot([1e3 * value for value in real], parts, color=style.STOCK, linewidth=2, label="measured")
    axis.plot([1e3 * value for value in simulated], parts, color=style.OURS, linewidth=2, label="simulated")


def points(ordered: list[float], parts: list[float]) -> list[float]:
    return [ordered[min(int(part * len(ordered)), len(ordered) - 1)] for part in parts]
