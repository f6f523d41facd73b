"""The picture: what a client measures, by workload and variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import style

TOGETHER = ", all rounds together"
PANELS = {
    f"ITL beside images P99{TOGETHER}": ("text while an image waits: ITL P99, ms", True),
    f"image TTFT P50{TOGETHER}": ("requests with images: TTFT P50, ms", False),
    f"within SLO %{TOGETHER}": ("requests within their SLO, %", False),
}
COLOURS = {"stock": style.STOCK, "ours": style.OURS}
OTHER = "#c9a18f"


def draw(path: Path, records: Sequence[dict[str, Any]], client: str = "vllm bench serve") -> Path | None:
    """Draw a panel for each measure; return None, without a file, if there is one variant only."""
    variants = list(dict.fromkeys(record["variant"] for record in records))
    if len(variants) < 2:
        return None
    workloads = list(dict.fromkeys(r["workload"] for r in records))
    figure, axes = style.new_figure(11.5, 2.6 + 0.8 * len(workloads), ncols=len(PANELS))
    for axis, (measure, (title, logarithmic)) in zip(axes, PANELS.items(), strict=True):
        found = {(r["workload"], r["variant"]): r["median"] for r in records if r["measure"] == measure}
        style.panel_title(axis, title)
        if logarithmic:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:,.0f}")
            axis.xaxis.set_minor_formatter("")
        height = 0.8 / len(variants)
        for number, variant in enumerate(variants):
            known = [at for at, workload in enumerate(workloads) if (workload, variant) in found]
            places = [at + (number - (len(variants) - 1) / 2) * height for at in known]
            values = [found[workloads[at], variant] for at in known]
            bars = axis.barh(places, values, height * 0.92, color=COLOURS.get(variant, OTHER), label=variant)
            axis.bar_label(bars, [f"{value:,.3g}" for value in values], padding=3, fontsize=8, color=style.MUTED)
        names = [name.replace(" beside ", "\nbeside ") for name in workloads] if axis is axes[0] else []
        axis.set_yticks(range(len(workloads)), names or [""] * len(workloads), fontsize=9)
        axis.set_ylim(len(workloads) - 0.5, -0.5)
        axis.margins(x=0.18)
    axes[0].legend(loc="upper left", bbox_to_anchor=(0.0, -0.1), ncols=len(variants), frameon=False, fontsize=9)
    style.headline(
        figure,
        f"{client}, stock and ours",
        "servers on two cores of a CPU whose workers sleep instead of polling; all rounds together",
    )
    figure.subplots_adjust(left=0.165, right=0.985, top=0.78, bottom=0.16, wspace=0.12)
    return style.save(figure, path)
