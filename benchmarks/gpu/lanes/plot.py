"""The picture: what the encoder keeps against what the tokens pay; the aim is the corner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.lanes.report import AIM_ITL, AIM_THROUGHPUT, Line
from benchmarks.harness import style


def picture(path: Path, found: Sequence[Line], gpu: str) -> Path:
    """Draw one dot for each variant that did both."""
    both = [line for line in found if line.itl_p99_ratio is not None and line.images_ratio is not None]
    figure, axis = style.new_figure(8.4, 5.2)
    highest = max([AIM_ITL, *(line.itl_p99_ratio or 0.0 for line in both)]) * 1.1
    axis.set_xlim(0, 1.1)
    axis.set_ylim(0.9, highest)
    axis.fill_between([AIM_THROUGHPUT, 1.1], 0.9, AIM_ITL, color=style.GRID, linewidth=0)
    for line in both:
        color = style.OURS if line.variant.startswith("lane") else style.STOCK
        axis.plot(line.images_ratio, line.itl_p99_ratio, "o", color=color)
        axis.annotate(
            line.variant,
            (line.images_ratio, line.itl_p99_ratio),
            xytext=(6, 3),
            textcoords="offset points",
            color=color,
            fontsize=8.5,
        )
    axis.set_xlabel("images per second, of the encoder alone")
    axis.set_ylabel("P99 of inter-token latency, of decode alone")
    style.headline(figure, "An encoder beside a decoding LLM", f"{gpu}; grey is the aim; medians over the rounds")
    figure.subplots_adjust(left=0.1, right=0.97, top=0.84, bottom=0.11)
    return style.save(figure, path)
