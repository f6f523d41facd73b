"""The picture: each predicted figure over the measured one, with the bar as a band around equality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.backtest import BARS
from benchmarks.harness import style

MARKS = {"TTFT": "o", "ITL": "s", "end to end": "^"}
COLOURS = {"stock": style.STOCK, "ours": style.OURS}
FILLED = ("none", "full", "left")  # by trace


def draw(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Draw a panel for P50 and one for P99, in milliseconds, with a line over the measured repetitions."""
    figure, axes = style.new_figure(13.5, 6.6, ncols=len(BARS))
    traces = list(dict.fromkeys(record["trace"] for record in records))
    for axis, (part, bar) in zip(axes, BARS.items(), strict=True):
        own = [record for record in records if record["figure"].endswith(part)]
        values = [1e3 * value for r in own for value in (r["measured"], r["predicted"])]
        ends = [min(values) / 1.5, max(values) * 1.5]
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
        axis.plot(ends, ends, color=style.MUTED, linewidth=1)
        low, high = ([end * factor for end in ends] for factor in (1 - bar, 1 + bar))
        axis.fill_between(ends, low, high, color=style.GRID, alpha=0.6)
        for r in own:
            name = r["figure"].removesuffix(f" {part}")
            x, y = 1e3 * r["measured"], 1e3 * r["predicted"]
            colour = COLOURS[r["variant"]]
            axis.plot([1e3 * min(r["rounds"]), 1e3 * max(r["rounds"])], [y, y], color=colour, linewidth=1)
            fill = FILLED[traces.index(r["trace"]) % len(FILLED)]
            axis.plot(x, y, MARKS[name], color=colour, fillstyle=fill, markersize=8)
        met = sum(record["within"] for record in own)
        title = f"{part}: {met} of {len(own)} within {bar:.0%}"
        style.panel_title(axis, title)
    for name, mark in MARKS.items():
        axes[0].plot([], [], mark, color=style.MUTED, label=name)
    for variant, colour in COLOURS.items():
        axes[0].plot([], [], color=colour, label=variant)
    for fill, trace in zip(FILLED, traces, strict=False):
        axes[0].plot([], [], "o", color=style.INK, fillstyle=fill, label=trace)
    axes[0].legend(loc="upper left", frameon=False, fontsize=9)
    quiet = "Traces that no calibration has seen, against a real server on two cores; lines: repetitions"
    style.headline(figure, "Predicted before it was measured", quiet)
    figure.subplots_adjust(left=0.07, right=0.98, top=0.84, bottom=0.09, wspace=0.18)
    return style.save(figure, path)
