"""Draw when the tokens of one stream reach the client, and what quantiles say of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import style

PANELS = {
    "in bursts %": "tokens within 0.1 ms of the one before, %",
    "step ms": "time between tokens in the engine core, ms",
}
SHOWN_SECONDS = 1.0


def draw(path: Path, records: Sequence[dict[str, Any]]) -> Path | None:
    """Draw arrivals at the fewest streams, and a panel for each measure; return None if there is one variant only."""
    variants = list(dict.fromkeys(record["variant"] for record in records))
    if len(variants) < 2:
        return None
    counts = list(dict.fromkeys(record["streams"] for record in records))
    found = {(r["streams"], r["variant"], r["measure"]): r for r in records}
    figure, (arrivals, *axes) = style.new_figure(15.5, 4.4, ncols=1 + len(PANELS), width_ratios=[2, 1, 1])
    colours = list(map(style.colours_of(variants).__getitem__, variants))
    fewest = min(counts)
    lines = {r["variant"]: r["arrivals"] for r in records if r["streams"] == fewest and "arrivals" in r}
    shown = [[1e3 * at for at in lines[variant] if at <= SHOWN_SECONDS] for variant in variants]
    arrivals.eventplot(shown, lineoffsets=range(len(variants)), linelengths=0.7, linewidths=0.8, colors=colours)
    arrivals.set_yticks(range(len(variants)), [variant.replace(", ", ",\n") for variant in variants])
    arrivals.set_ylim(len(variants) - 0.5, -0.5)
    arrivals.set_xlabel("ms since its first token")
    title = "tokens of a stream as the client has them" + (f", one of {fewest}" if fewest > 1 else "")
    style.panel_title(arrivals, title)
    for axis, (measure, title) in zip(axes, PANELS.items(), strict=True):
        style.panel_title(axis, title)
        width = 0.8 / len(variants)
        for number, (variant, colour) in enumerate(zip(variants, colours, strict=True)):
            places = [at + (number - (len(variants) - 1) / 2) * width for at in range(len(counts))]
            values = [found[count, variant, measure]["median"] for count in counts]
            bars = axis.bar(places, values, width * 0.92, color=colour)
            axis.bar_label(bars, [f"{value:,.3g}" for value in values], padding=2, fontsize=6, color=style.MUTED)
        axis.set_xticks(range(len(counts)), [f"{count}" for count in counts])
        axis.set_xlabel("streams")
        axis.margins(y=0.12)
    style.headline(
        figure,
        "A client on the cores of an engine that polls has its tokens in bursts",
        "text streams over HTTP from one server on two cores; on the left a round in the middle, else medians",
    )
    figure.subplots_adjust(left=0.1, right=0.985, top=0.78, bottom=0.13, wspace=0.16)
    return style.save(figure, path)
