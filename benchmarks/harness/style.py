"""The look of the pictures: no box, no legend, titles that say what was found; a line is labelled at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK, MUTED, GRID = "#1f2328", "#6e7781", "#e3e6ea"
OURS, STOCK = "#0b7a75", "#b3402a"
COLOURS = (
    OURS, STOCK, "#3b5bdb", "#9c6b00", "#7b3fa0", "#2b7a0b", "#a8326e", "#4a5560", "#c2762d", "#1b7fb5", "#7d8c1f",
    "#8c6d5a",
)  # fmt: skip


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each system: the first *ours* and the first *stock* have the same ones in every picture."""
    kept = {}
    for word, colour in (("ours", OURS), ("stock", STOCK)):
        first = next((name for name in names if name.split()[:1] == [word]), None)
        if first is not None:
            kept[first] = colour
    rest = [name for name in names if name not in kept]
    free = COLOURS[2:] if kept else COLOURS
    return kept | {name: free[at % len(free)] for at, name in enumerate(rest)}


def headline(figure: Any, title: str, subtitle: str) -> None:
    """Left-aligned title that says the finding, and a quiet line that says what is drawn."""
    figure.text(0.02, 0.985, title, fontsize=13, fontweight="bold", va="top", ha="left")
    figure.text(0.02, 0.925, subtitle, fontsize=9.5, color=MUTED, va="top", ha="left")


def new_figure(width: float = 8.0, height: float = 4.5, **subplots: Any) -> tuple[Any, Any]:
    """Return `matplotlib.pyplot.subplots` in the common style, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "text.color": INK,
            "axes.edgecolor": MUTED,
            "axes.labelcolor": MUTED,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": GRID,
            "grid.linewidth": 0.8,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
        }
    )
    return plt.subplots(figsize=(width, height), **subplots)


def panel_title(axes: Any, title: str) -> None:
    """Write the title of one of several plots in a picture, at its left."""
    axes.set_title(title, fontsize=10, color=INK, loc="left")


def spread_labels(heights: Sequence[float], gap: float) -> list[float]:
    """Return heights of labels at least ``gap`` apart, as near to ``heights`` as their order allows."""
    order = sorted(range(len(heights)), key=lambda at: heights[at])
    groups: list[tuple[list[int], float]] = []  # members, lowest height
    for at in order:
        groups.append(([at], heights[at]))
        while len(groups) > 1 and groups[-2][1] + gap * len(groups[-2][0]) > groups[-1][1]:
            (upper, _), (lower, _) = groups.pop(), groups.pop()
            members = lower + upper
            centre = sum(heights[one] for one in members) / len(members)
            groups.append((members, centre - gap * (len(members) - 1) / 2))
    placed = [0.0] * len(heights)
    for members, lowest in groups:
        for rank, at in enumerate(members):
            placed[at] = lowest + gap * rank
    return placed


def label_ends(axes: Any, named: Sequence[tuple[str, float, float, str]]) -> None:
    """Draw the name of each line at the right of the axes, at the height of its end, without overlap.

    Args:
        named: name, x and y of the end in data, colour.
    """
    transform = axes.transData + axes.transAxes.inverted()
    heights = [float(transform.transform((x, y))[1]) for _, x, y, _ in named]
    gap = 0.17 / (axes.figure.get_figheight() * axes.get_position().height)
    for (name, _, _, colour), height in zip(named, spread_labels(heights, gap), strict=True):
        axes.text(1.012, height, name, transform=axes.transAxes, color=colour, fontsize=9.5, va="center", ha="left")


def save(figure: Any, path: Path, dpi: int = 160) -> Path:
    """Write the plot. Equal plots are equal bytes: no software or date is in them.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=dpi, format="png", metadata={"Software": None})
    finally:
        plt.close(figure)
    return path
