"""The look of the pictures: that of the simulator's, with titles that say what was found."""

from __future__ import annotations

from typing import Any

from vllm_omni_sched.sim.output.style import GRID, INK, MUTED, new_figure, panel_title, save, spread_labels

__all__ = ["GRID", "INK", "MUTED", "OURS", "STOCK", "headline", "new_figure", "panel_title", "save", "spread_labels"]

OURS, STOCK = "#0b7a75", "#b3402a"


def headline(figure: Any, title: str, subtitle: str) -> None:
    """Left-aligned title that says the finding, and a quiet line that says what is drawn."""
    figure.text(0.02, 0.985, title, fontsize=13, fontweight="bold", va="top", ha="left")
    figure.text(0.02, 0.925, subtitle, fontsize=9.5, color=MUTED, va="top", ha="left")
