"""Draw one page of pictures: a panel for each part, and the defaults that it would change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.gpu.ipc import SIZES
from benchmarks.gpu.lanes.report import AIM_ITL, AIM_THROUGHPUT
from benchmarks.gpu.parts import Ended, Outcome
from benchmarks.gpu.verdicts import Advice, Finding
from benchmarks.harness import style

Rows = Sequence[Mapping[str, Any]]
WIDTH = 50  # characters of a line of the words


def picture(path: Path, ended: Sequence[Ended], found: Sequence[Finding], gpu: str) -> Path:
    """Draw the page."""
    figure, first = style.new_figure(11.7, 10.4)
    first.remove()
    panels: dict[str, Callable[[Any, Rows], None]] = {
        "lanes": _lanes,
        "ipc": _ipc,
        "nvdec": _nvdec,
        "frames": _frames,
        "copies": _copies,
        "vllm": _vllm,
    }
    by_name = {one.part.name: one for one in ended}
    grid = figure.add_gridspec(3, 3, left=0.07, right=0.98, top=0.88, bottom=0.06, wspace=0.32, hspace=0.5)
    for place, (name, draw) in enumerate(panels.items()):
        axis = figure.add_subplot(grid[place // 2, place % 2])
        one = by_name.get(name)
        if one is not None and one.rows:
            draw(axis, list(one.rows))
        else:
            why = "was not asked for" if one is None else one.reason or one.outcome.value
            axis.set_axis_off()
            axis.text(0.5, 0.5, fill(f"{name}: {why}", 34), ha="center", va="center", color=style.MUTED, fontsize=9)
        axis.set_title(name, loc="left", fontsize=10, fontweight="bold")
        axis.tick_params(labelsize=7)
    words = figure.add_subplot(grid[:, 2])
    words.set_axis_off()
    words.text(-0.1, 1.0, _words(ended, found), va="top", ha="left", fontsize=8.2, linespacing=1.35)
    changes = sum(one.advice is Advice.CHANGE for one in found)
    style.headline(figure, f"{changes} defaults would change", f"{gpu}; medians; right: each default, and why")
    return style.save(figure, path)


def _words(ended: Sequence[Ended], found: Sequence[Finding]) -> str:
    lines = []
    for one in found:
        what = f"{one.advice.value.upper()}  {one.option}: {one.now}" + f" → {one.then}" * (one.now != one.then)
        lines.append(fill(what, WIDTH))
        lines.append(fill(one.why, WIDTH, initial_indent="   ", subsequent_indent="   "))
    for part in ended:
        if part.outcome is not Outcome.DONE:
            lines.append(fill(f"{part.part.name}: {part.outcome.value}. {part.reason}", WIDTH))
    return "\n".join(lines)


def _lanes(axis: Any, rows: Rows) -> None:
    both = [row for row in rows if "itl_p99_of_alone" in row and "images_of_alone" in row]
    highest = max([AIM_ITL, *(row["itl_p99_of_alone"] for row in both)]) * 1.1
    axis.set_xlim(0, 1.1)
    axis.set_ylim(0.9, highest)
    axis.fill_between([AIM_THROUGHPUT, 1.1], 0.9, AIM_ITL, color=style.GRID, linewidth=0)
    series: dict[str, list[tuple[float, float, str]]] = {}
    for row in both:
        ways = row["variant"].split(", ")
        by = [way for way in ways if way.startswith("share ") or way.endswith(" SMs")]
        name = ", ".join([ways[0], *(["by SMs" if by[0].endswith("SMs") else "by share"] if by else []),
                          *(way for way in ways[1:] if way not in by)])  # fmt: skip
        at = by[0].removeprefix("share ").removesuffix(" SMs") if by else ""
        series.setdefault(name, []).append((row["images_of_alone"], row["itl_p99_of_alone"], at))
    for name, points in series.items():
        images, itl, said = zip(*sorted(points), strict=True)
        line = "o-" if name.startswith("lane") else "x--"
        axis.plot(images, itl, line, markersize=3.5, linewidth=0.8, label=name)
        if name.startswith("lane") and "prior" not in name:
            for x, y, one in zip(images, itl, said, strict=True):
                axis.annotate(one, (x, y), xytext=(2, 3), textcoords="offset points", fontsize=6, color=style.MUTED)
    axis.legend(fontsize=5.5, frameon=False, loc="upper left")
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


def _frames(axis: Any, rows: Rows) -> None:
    timed = [row for row in rows if "host_of_stay" in row]
    for at, (name, color) in enumerate((("host_seconds", style.STOCK), ("stay_seconds", style.OURS))):
        heights = [row[name]["median"] * 1e3 for row in timed]
        label = "through the host" if at == 0 else "stay on the GPU"
        axis.bar([place + 0.4 * at for place in range(len(timed))], heights, 0.38, color=color, label=label)
    names = [f"{row['clip']}, {row['frames']}" for row in timed]
    axis.set_xticks([place + 0.2 for place in range(len(timed))], names, fontsize=7)
    axis.set_ylabel("ms", fontsize=8)
    axis.legend(fontsize=6, frameon=False)


TOLD = {
    "ITL beside images P99, all rounds together": "ITL P99\nbeside\nimages",
    "text TTFT P99, all rounds together": "text\nTTFT\nP99",
    "image TTFT P50, all rounds together": "image\nTTFT\nP50",
    "image TTFT P99, all rounds together": "image\nTTFT\nP99",
    "tokens / s, all rounds together": "tokens\nper second",
}
"""Measures of `benchmarks.mixed` on the page, and what it calls them."""


def _vllm(axis: Any, rows: Rows) -> None:
    ratios = {row["measure"]: row["ratio"] for row in rows if row["measure"] in TOLD and "ratio" in row}
    axis.bar(range(len(ratios)), list(ratios.values()), 0.6, color=style.OURS)
    axis.axhline(1.0, color=style.STOCK, linewidth=1)
    for place, ratio in enumerate(ratios.values()):
        axis.annotate(
            f"{ratio:.2f}", (place, ratio), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7
        )
    axis.set_xticks(range(len(ratios)), [TOLD[name] for name in ratios], fontsize=6)
    axis.set_ylabel("ours, of stock", fontsize=8)


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
