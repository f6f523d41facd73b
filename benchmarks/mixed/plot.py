"""The picture: what text and image requests get as load grows, one line per variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import style
from benchmarks.harness.stats import bounds

PANELS = {
    "within SLO %, all rounds together": ("requests within their SLO, %", False),
    "ITL beside images P99": ("text tokens while an image waits: ITL P99, ms", True),
    "image TTFT P50": ("image requests: TTFT P50, ms", True),
}


def draw(path: Path, records: Sequence[dict[str, Any]]) -> Path | None:
    """Draw all panels; return None, without a file, unless there are two variants at two loads."""
    variants = list(dict.fromkeys(record["variant"] for record in records))
    loads = sorted({record["load"] for record in records})
    if len(loads) < 2 or len(variants) < 2:
        return None
    figure, axes = style.new_figure(13.5, 4.2, ncols=len(PANELS))
    for axis, (measure, (title, logarithmic)) in zip(axes, PANELS.items(), strict=True):
        style.panel_title(axis, title)
        axis.set_xscale("log", base=2)
        if logarithmic:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:,.0f}")
            axis.yaxis.set_minor_formatter("")
        axis.set_xticks(loads, [f"{load:g}" for load in loads])
        axis.set_xlabel("load")
        for variant in variants:
            found = {r["load"]: r for r in records if r["variant"] == variant and r["measure"] == measure}
            points = [(load, found[load]) for load in loads if load in found]
            colour = style.STOCK if variant == "stock" else style.OURS
            medians = [record["median"] for _, record in points]
            axis.plot([load for load, _ in points], medians, color=colour, linewidth=2.2, marker="o", markersize=4)
            axis.fill_between(
                [load for load, _ in points],
                [bounds(record)[0] for _, record in points],
                [bounds(record)[1] for _, record in points],
                color=colour,
                alpha=0.12,
                linewidth=0,
            )
            if points:
                axis.annotate(
                    variant,
                    (points[-1][0], medians[-1]),
                    xytext=(6, 0),
                    textcoords="offset points",
                    color=colour,
                    va="center",
                )
    style.headline(
        figure,
        "Tokens go on while pictures are encoded",
        "Text streams and bursty image requests on one CPU engine; medians over rounds, the band is the spread",
    )
    figure.subplots_adjust(left=0.05, right=0.955, top=0.78, bottom=0.13, wspace=0.28)
    return style.save(figure, path)
