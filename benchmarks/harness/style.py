"""The look of the pictures: no box, no legend; every line says its own name where it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INK, MUTED, GRID = "#1f2328", "#6e7781", "#e3e6ea"
OURS, STOCK = "#0b7a75", "#b3402a"


def new_figure(width: float = 8.0, height: float = 4.5, **subplots: Any) -> tuple[Any, Any]:
    """`matplotlib.pyplot.subplots` in the house style, drawn without a display."""
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


def headline(figure: Any, title: str, subtitle: str) -> None:
    """Left-aligned title that says the finding, and a quiet line that says what is drawn."""
    figure.text(0.02, 0.985, title, fontsize=13, fontweight="bold", va="top", ha="left")
    figure.text(0.02, 0.925, subtitle, fontsize=9.5, color=MUTED, va="top", ha="left")


def spread_labels(heights: list[float], gap: float) -> list[float]:
    """Label heights at least `gap` apart, as near to `heights` as their order allows (same unit as `heights`)."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[tuple[list[int], float]] = []  # members, lowest height
    for i in order:
        groups.append(([i], heights[i]))
        while len(groups) > 1 and groups[-2][1] + gap * len(groups[-2][0]) > groups[-1][1]:
            (upper, _), (lower, _) = groups.pop(), groups.pop()
            members = lower + upper
            centre = sum(heights[j] for j in members) / len(members)
            groups.append((members, centre - gap * (len(members) - 1) / 2))
    placed = [0.0] * len(heights)
    for members, lowest in groups:
        for rank, i in enumerate(members):
            placed[i] = lowest + gap * rank
    return placed


def save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    # no software or date in the file: equal pictures are equal bytes
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)
    return path
