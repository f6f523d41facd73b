"""Draw one page of pictures: a panel for each part, and the defaults that it would change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.gpu.lanes.report import AIM_ITL, AIM_THROUGHPUT
from benchmarks.gpu.parts import Ended, Outcome
from benchmarks.gpu.verdicts import SIZES, Advice, Finding
from benchmarks.harness import style

Rows = Sequence[Mapping[str, Any]]


def picture(path: Path, ended: Sequence[Ended], found: Sequence[Finding], gpu: str) -> Path:
    """Draw the page."""
    figure, first = style.new_figure(11.7, 8.3)
    first.remove()
    panels: dict[str, Callable[[Any, Rows], None]] = {"lanes": _lanes, "ipc": _ipc, "nvdec": _nvdec, "copies": _copies}
    by_name = {one.part.name: one for one in ended}
    for place, (name, draw) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(2, 3, place + (place > 2))
        one = by_name.get(name)
        if one is not None and one.rows:
            draw(axis, list(one.rows))
        else:
            why = "was not asked for" if one is None else one.reason or one.outcome.value
            axis.set_axis_off()
            axis.text(0.5, 0.5, fill(f"{name}: {why}", 34), ha="center", va="center", color=style.MUTED, fontsize=9)
        axis.set_title(name, loc="left", fontsize=10, fontweight="bold")
    words = figure.add_subplot(1, 3, 3)
    words.set_axis_off()
    words.text(0.0, 1.0, _words(ended, found), va="top", ha="left", fontsize=8.2, linespacing=1.35)
    changes = sum(one.advice is Advice.CHANGE for one in found)
    style.headline(figure, f"{changes} defaults would change", f"{gpu}; medians; right: each default, and why")
    figure.subplots_adjust(left=0.07, right=0.98, top=0.84, bottom=0.08, wspace=0.32, hspace=0.42)
    return style.save(figure, path)


def _words(ended: Sequence[Ended], found: Sequence[Finding]) -> str:
    lines = []
    for one in found:
        lines.append(
            f"{one.advice.value.upper()}  {one.option}: {one.now}" + (f" → {one.then}" * (one.now != one.then))
        )
        lines.append(fill(one.why, 58, initial_indent="   ", subsequent_indent="   "))
    for part in ended:
        if part.outcome is not Outcome.DONE:
            lines.append(fill(f"{part.part.name}: {part.outcome.value}. {part.reason}", 58))
    return "\n".join(lines)


def _lanes(axis: Any, rows: Rows) -> None:
    both = [row for row in rows if "itl_p99_of_alone" in row and "images_of_alone" in row]
    highest = max([AIM_ITL, *(row["itl_p99_of_alone"] for row in both)]) * 1.1
    axis.set_xlim(0, 1.1)
    axis.set_ylim(0.9, highest)
    axis.fill_between([AIM_THROUGHPUT, 1.1], 0.9, AIM_ITL, color=style.GRID, linewidth=0)
    for row in both:
        color = style.OURS if row["variant"].startswith("lane") else style.STOCK
        axis.plot(row["images_of_alone"], row["itl_p99_of_alone"], "o", color=color, markersize=4)
        at = (row["images_of_alone"], row["itl_p99_of_alone"])
        axis.annotate(row["variant"], at, xytext=(4, 2), textcoords="offset points", fontsize=6, color=color)
    axis.set_xlabel("images per second, of alone", fontsize=8)
    axis.set_ylabel("P99 of ITL, of alone", fontsize=8)


def _ipc(axis: Any, rows: Rows) -> None:
    by_variant: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.get("measure") == "end to end":
            by_variant.setdefault(row["variant"], []).append((SIZES.get(row["size"], 0), row["median"]))
    for variant, points in by_variant.items():
        sizes, seconds = zip(*sorted(points), strict=True)
        axis.plot(sizes, [one * 1e6 for one in seconds], "o-", markersize=3, label=variant)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("bytes", fontsize=8)
    axis.set_ylabel("µs end to end", fontsize=8)
    axis.legend(fontsize=6, frameon=False)


def _nvdec(axis: Any, rows: Rows) -> None:
    clips: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.get("decoder") == "nvdec" and "seconds" in row:
            clips.setdefault(f"{row['clip']}, {row['task']}", []).append((row["decoders"], row["seconds"]["median"]))
    for name, points in clips.items():
        engines, seconds = zip(*sorted(points), strict=True)
        axis.plot(engines, [one * 1e3 for one in seconds], "o-", markersize=3, label=name)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("engines on one video", fontsize=8)
    axis.set_ylabel("ms", fontsize=8)
    axis.legend(fontsize=6, frameon=False)


def _copies(axis: Any, rows: Rows) -> None:
    tiers = sorted((row for row in rows if row["task"] == "host tier"), key=lambda row: int(row["embeds"]))
    sizes = [row["embeds"] for row in tiers]
    for name, color in (("keep", style.STOCK), ("restore", style.OURS)):
        axis.plot(sizes, [row[f"{name}_seconds"]["median"] * 1e3 for row in tiers], "o-", color=color, label=name)
    for row in rows:
        if row["task"] == "encode":
            each = row["encode_seconds"]["median"] / row["embeds"] * 1e3
            axis.plot(sizes, [each * size for size in sizes], "--", color=style.MUTED, label="encode")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("embeddings", fontsize=8)
    axis.set_ylabel("ms", fontsize=8)
    axis.legend(fontsize=6, frameon=False)
