"""Plot the fraction of requests within the SLO, by setting and control."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.harness.style import MUTED, OURS, headline, new_figure


def plot(records: list[dict[str, Any]], finding: str, path: Path) -> Path:
    settings = list(dict.fromkeys(one["setting"] for one in records))
    figure, axes = new_figure(10.0, 6.0, ncols=3, nrows=-(-len(settings) // 3), sharex=True, squeeze=False)
    for at, axis in enumerate(axes.flat):
        if at >= len(settings):
            axis.set_visible(False)
            continue
        ours = [one for one in records if one["setting"] == settings[at]]
        for row, one in enumerate(reversed(ours)):
            mean, low, high = one["attainment"]
            color = OURS if one["control"] == "learned" else MUTED
            axis.plot([low, high], [row, row], color=color, linewidth=2)
            axis.plot([mean], [row], "o", color=color)
        axis.set_yticks(
            range(len(ours)), [one["control"] for one in reversed(ours)] if at % 3 == 0 else [""] * len(ours)
        )
        axis.set_title(settings[at], fontsize=9, loc="left")
        axis.set_xlim(-0.03, 1.03)
    headline(
        figure, finding.split(" within")[0], "Simulated: part of the requests within the SLO; mean and 95 % interval"
    )
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    part = path.with_name("." + path.name)
    figure.savefig(part, dpi=110, format="png")
    os.replace(part, path)
    return path
