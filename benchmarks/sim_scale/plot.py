"""The picture: events per second, and what a simulated second takes, against GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.style import OURS, STOCK, headline, new_figure, save

_COLOURS = {"stock": STOCK, "ours": OURS}


def plot(path: Path, scale: Sequence[Mapping[str, Any]], exponents: Mapping[str, float]) -> Path:
    """Draw one line for each variant."""
    figure, (left, right) = new_figure(9.5, 4.6, ncols=2)
    for variant, colour in _COLOURS.items():
        rows = sorted((row for row in scale if row["variant"] == variant), key=lambda row: row["gpus"])
        gpus = [row["gpus"] for row in rows]
        for axes, key, part in ((left, "events_per_second", 1e3), (right, "cpu_seconds_per_simulated_second", 1.0)):
            heights = [row[key] / part for row in rows]
            axes.plot(gpus, heights, color=colour, marker="o", markersize=4)
            axes.annotate(
                variant, (gpus[-1], heights[-1]), (6, 0), textcoords="offset points", color=colour, va="center"
            )
    left.axhline(200, linewidth=0.8, linestyle="--", color="#6e7781")
    left.annotate("aim: 200,000", (10, 200), (0, 4), textcoords="offset points", color="#6e7781", fontsize=9)
    left.set(xscale="log", xlabel="GPUs", ylabel="1,000 events per second, one core", ylim=(0, None))
    right.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="processor seconds per simulated second")
    for axes in (left, right):
        axes.margins(x=0.15)
    found = ", ".join(f"{name} {value:.2f}" for name, value in exponents.items())
    headline(
        figure,
        "What it costs to simulate 10 to 10,000 GPUs",
        f"text and pictures, 4 requests/s each; exponents against GPUs: {found}",
    )
    figure.tight_layout(rect=(0, 0, 1, 0.89))
    return save(figure, path)
