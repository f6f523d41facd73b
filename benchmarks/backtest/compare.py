"""Compare what was predicted with what was measured, and with how far repetitions of the measurement are apart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.backtest import BARS
from benchmarks.backtest.figures import FIGURES, measured_figures


def compare(
    predictions: Sequence[Mapping[str, Any]], measured: Mapping[tuple[str, str], Sequence[Sequence[dict[str, Any]]]]
) -> list[dict[str, Any]]:
    """Return a record for each trace, variant and figure.

    ``measured``: the median of the repetitions, each on a server of its own. ``spread``: the largest difference between
    two of them, by that median.
    ``within``: the error is within its bar; None for figures that have none. ``explained``: it is within the spread.
    With one repetition, ``spread`` and ``explained`` are None.
    """
    found = []
    for one in predictions:
        rounds = [measured_figures(answers) for answers in measured[one["trace"], one["variant"]]]
        for name in FIGURES:
            values = [of_round[name] for of_round in rounds]
            middle = statistics.median(values)
            expected = one["figures"][name]
            off = expected["predicted"] / middle - 1 if middle else 0.0
            spread = (max(values) - min(values)) / middle if len(values) > 1 and middle else None
            bar = BARS.get(name.split()[-1])
            found.append(
                {
                    "trace": one["trace"],
                    "variant": one["variant"],
                    "figure": name,
                    "measured": round(middle, 6),
                    "rounds": [round(value, 6) for value in values],
                    **{key: round(value, 6) for key, value in expected.items()},
                    "off": round(off, 4),
                    "spread": None if spread is None else round(spread, 4),
                    "within": None if bar is None else abs(off) <= bar,
                    "explained": None if spread is None else abs(off) <= spread,
                }
            )
    return found
