"""The picture: cost against items, log-log, one line per variant, each named where it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import style
from benchmarks.step_cost.measure import Cell
from benchmarks.step_cost.variants import Variant

PANELS = {"realtime_frame": "CPU time of the scheduler", "message_bytes": "message to each worker"}
SMALLEST = 256  # below that a line would show fixed cost only, over half of the width
STOCK_SHADES = ("#c9b2a9", "#d08c7a", "#c26a55", "#b3402a", "#7d2616")  # older to newer
LABEL_GAP = 0.062  # of the height of a panel


def draw(path: Path, cells: Sequence[Cell]) -> Path | None:
    """Panels of PANELS for which there are at least two sizes; None, and no file, when there is none."""
    cells = [cell for cell in cells if cell.variant.runner == "v1" or cell.variant.kind != "patched"]
    panels = {
        name: title
        for name, title in PANELS.items()
        if len({c.size for c in cells if c.scenario == name and c.size >= SMALLEST}) > 1
    }
    if not panels:
        return None
    figure, axes = style.new_figure(6.2 * len(panels), 4.6, ncols=len(panels), squeeze=False)
    for axis, (name, title) in zip(axes[0], panels.items(), strict=True):
        _panel(axis, [cell for cell in cells if cell.scenario == name and cell.size >= SMALLEST], title)
    style.headline(
        figure,
        "What one more frame costs as a session grows",
        "What the next 80 ms frame of a realtime session costs on vLLM's real scheduler classes; one run, medians",
    )
    figure.subplots_adjust(left=0.06, right=0.84, top=0.80, bottom=0.12, wspace=0.72)
    return style.save(figure, path)


def _panel(axis: Any, cells: Sequence[Cell], title: str) -> None:
    style.panel_title(axis, title)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lines = {variant: _points(cells, variant) for variant in dict.fromkeys(cell.variant for cell in cells)}
    stock = [variant for variant in lines if variant.kind == "stock"]
    for variant, points in lines.items():
        colour = style.OURS
        if variant.kind == "stock":
            colour = STOCK_SHADES[
                max(stock.index(variant) - len(stock), -len(STOCK_SHADES))
            ]  # the newest is the darkest
        axis.plot(
            *zip(*points, strict=True),
            color=colour,
            linewidth=1.8 if variant.kind == "stock" else 2.4,
            linestyle=(0, (2, 1.2)) if variant.kind == "patched" else ":" if variant.runner == "v2" else "-",
            zorder=3 if variant.kind == "ours" else 2,
            label=f"{_name(variant)}  {_amount(points[-1][1], cells[0].scenario)}",
        )
    sizes = sorted({cell.size for cell in cells})
    axis.set_xlim(sizes[0], sizes[-1])
    axis.set_xticks(sizes, [_short(size) for size in sizes])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: _amount(value, cells[0].scenario))
    axis.set_xlabel("frames that the session holds")
    _label_lines(axis)


def _label_lines(axis: Any) -> None:
    """Names at the right ends, moved apart where lines end together."""
    low, high = (math.log(limit) for limit in axis.get_ylim())
    ends = [(math.log(line.get_ydata()[-1]) - low) / (high - low) for line in axis.lines]
    for line, end, place in zip(axis.lines, ends, style.spread_labels(ends, LABEL_GAP), strict=True):
        axis.annotate(
            line.get_label(),
            (1.0, end),
            xytext=(1.045, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=line.get_color(),
            fontsize=9,
            fontweight="bold" if line.get_color() == style.OURS else "normal",
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def _points(cells: Sequence[Cell], variant: Variant) -> list[tuple[int, float]]:
    scale = 1.0 if cells[0].scenario == "message_bytes" else 1e3
    return sorted((cell.size, cell.summary.median * scale) for cell in cells if cell.variant == variant)


def _amount(value: float, scenario: str) -> str:
    """Milliseconds, or bytes in the unit that fits."""
    if scenario != "message_bytes":
        return f"{float(f'{value:.2g}'):g} ms"
    for unit, size in (("MB", 1e6), ("KB", 1e3)):
        if value >= size:
            return f"{float(f'{value / size:.2g}'):g} {unit}"
    return f"{value:.0f} B"


def _name(variant: Variant) -> str:
    name = {
        "stock": f"vLLM {variant.version}",
        "patched": f"{variant.version} patched",
        "ours": f"ours on {variant.version}",
    }[variant.kind]
    return name + " V2" * (variant.runner == "v2")


def _short(size: int) -> str:
    return f"{size // 1024}K" if size >= 1024 else str(size)
