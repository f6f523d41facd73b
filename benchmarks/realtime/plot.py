"""The picture: milliseconds per frame against frames, on a log-log scale, with the line at which real time is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import style
from benchmarks.realtime import FRAME_SECONDS

COLOURS = {"stock": style.STOCK, "ours": style.OURS}
NAMES = {"stock": "stock vLLM", "ours": "OmniScheduler"}


def draw(path: Path, runs: Sequence[Mapping[str, Any]], vllm_version: str) -> Path:
    """Draw one panel per number of sessions; `runs` as in the result file."""
    counts = sorted({run["sessions"] for run in runs})
    width = 8.0 if len(counts) == 1 else 5.2 * len(counts)
    figure, panels = style.new_figure(width, 4.6, ncols=len(counts), sharey=True, squeeze=False)
    for axis, sessions in zip(panels[0], counts, strict=True):
        _panel(axis, [run for run in runs if run["sessions"] == sessions], sessions)
    panels[0][0].set_ylabel("milliseconds per frame")
    style.headline(
        figure,
        "A realtime session keeps real time" if counts == [1] else "Realtime sessions keep real time",
        f"Tiny VoxtralRealtime on CPU, vLLM {vllm_version}, one run: median time per 80 ms audio frame",
    )
    figure.subplots_adjust(left=0.08, right=0.97, top=0.84, bottom=0.12, wspace=0.08)
    return style.save(figure, path)


def _panel(axis: Any, runs: Sequence[Mapping[str, Any]], sessions: int) -> None:
    limit = FRAME_SECONDS * 1e3
    longest = max(run["buckets"][-1]["frames"] for run in runs)
    named = set()
    for run in runs:
        frames = [bucket["frames"] for bucket in run["buckets"]]
        cost = [bucket["seconds_per_frame"]["median"] * 1e3 for bucket in run["buckets"]]
        colour = COLOURS[run["variant"]]
        axis.plot(frames, cost, color=colour, linewidth=2.2, solid_capstyle="round")
        if run["variant"] in named:  # a repeat
            continue
        named.add(run["variant"])
        axis.plot(frames[-1], cost[-1], "o", color=colour, markersize=5)
        room_at_the_right = frames[-1] < 0.7 * longest
        height = min(cost[-1] if room_at_the_right else max(cost[-len(cost) // 4 :]), 1.7 * limit)
        if not room_at_the_right and 0.65 * limit < height < limit:  # the text would lie on the limit's line
            height = limit
        axis.annotate(
            f"{NAMES[run['variant']]}\n{cost[-1]:.0f} ms at {frames[-1]:,} frames",
            (frames[-1], height),
            xytext=(9, 0) if room_at_the_right else (0, 9),
            textcoords="offset points",
            ha="left" if room_at_the_right else "right",
            va="center" if room_at_the_right else "bottom",
            color=colour,
            fontweight="bold",
        )
    axis.set_ylim(0, 2 * limit)
    axis.set_xlim(0, longest * 1.03)
    axis.axhspan(limit, 2 * limit, color=style.STOCK, alpha=0.06, linewidth=0)
    axis.axhline(limit, color=style.INK, linewidth=1, linestyle=(0, (4, 3)))
    axis.text(
        0.5,  # where no line crosses the limit: those of stock do so early, or end at the right
        limit + 2,
        "80 ms: real time is lost above",
        transform=axis.get_yaxis_transform(),
        ha="center",
        fontsize=9,
        color=style.INK,
    )
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel(f"frames so far, {sessions} session{'s' * (sessions > 1)}")
