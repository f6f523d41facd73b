"""Plot distributions of TTFT and ITL, measured and simulated, one row for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import style
from benchmarks.sim_fidelity.compare import Rounds, gaps, grouped, ttfts
from benchmarks.sim_fidelity.simulate import simulate
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.measure import Histogram


def draw(path: Path, rounds: Rounds, costs: MeasuredCosts, records: Sequence[dict[str, Any]]) -> Path:
    """Draw a row for each variant and load: distributions on the left, figures on the right."""
    groups = grouped(rounds)
    figure, axes = style.new_figure(12.5, 1.0 + 2.7 * len(groups), nrows=len(groups), ncols=3, squeeze=False)
    for row, ((variant, load), own) in zip(axes, groups, strict=True):
        itl, ttft = Histogram(), []
        for one in own:
            ttft += simulate(costs, one, itl)
        parts = [i / 500 for i in range(1, 500)]
        where = "all loads" if load is None else f"load {load:g}"
        cdf(row[0], f"{variant}, {where}: TTFT, ms", ttfts(own), points(sorted(ttft), parts), parts)
        cdf(row[1], "ITL, ms", gaps(own), [itl.quantile(part) for part in parts], parts)
        _table(row[2], [r for r in records if (r["variant"], r["load"]) == (variant, load)])
    axes[0][0].legend(frameon=False, loc="lower right")
    # a tall figure: the heads of `style.headline` would lie on the first row
    inch = 1 / (1.0 + 2.7 * len(groups))
    title = "The engine, and the simulator on the same arrivals"
    quiet = "Text streams and bursty image requests on one CPU engine; costs calibrated on other loads"
    figure.text(0.02, 1 - 0.1 * inch, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.02, 1 - 0.38 * inch, quiet, fontsize=9.5, color=style.MUTED, va="top")
    figure.subplots_adjust(left=0.05, right=0.99, top=1 - 0.95 * inch, bottom=0.4 * inch, hspace=0.5)
    return style.save(figure, path)


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


def _table(axis: Any, records: Sequence[dict[str, Any]]) -> None:
    axis.axis("off")
    cells = [
        [r["measure"], f"{r['measured_ms']:,.4g}", f"{r['simulated_ms']:,.4g}", f"{100 * r['off']:+.0f} %"]
        for r in records
    ]
    shown = axis.table(cells, colLabels=["ms", "measured", "simulated", "off"], loc="center", edges="horizontal")
    shown.scale(1, 1.5)
    for i, record in enumerate(records):
        shown[i + 1, 3].get_text().set_color(style.OURS if record["within"] else style.STOCK)
