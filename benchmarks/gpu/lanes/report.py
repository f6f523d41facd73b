"""What is made of the samples: ratios to running alone, a table, the record. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.gpu.lanes.variants import DECODE_ALONE, ENCODE_ALONE
from benchmarks.harness.stats import Summary, quantile

AIM_ITL, AIM_THROUGHPUT = 1.15, 0.6  # P99 of inter-token latency at most, images per second at least, of alone


@dataclass(frozen=True)
class Sample:
    """Result of one turn of a variant: seconds between tokens, and encoded images per second; either may be missing."""

    gaps: Sequence[float] = ()
    images_per_second: float = 0.0

    def itl(self, q: float) -> float:
        return quantile(self.gaps, q)


Rounds = Mapping[str, Sequence[Sample]]
"""Samples by variant, turn by turn; those of the two that run alone are always there."""


@dataclass(frozen=True)
class Line:
    """Summary of one variant: medians over the rounds, and medians of the ratios to running alone."""

    variant: str
    itl_p50: Summary | None
    itl_p99: Summary | None
    images: Summary | None
    itl_p50_ratio: float | None
    itl_p99_ratio: float | None
    images_ratio: float | None

    @property
    def meets_the_aim(self) -> bool:
        if self.itl_p99_ratio is None or self.images_ratio is None:
            return False
        return self.itl_p99_ratio <= AIM_ITL and self.images_ratio >= AIM_THROUGHPUT


def lines(rounds: Rounds) -> list[Line]:
    """Return one line for each variant that was measured."""
    decode, encode = rounds[DECODE_ALONE.name], rounds[ENCODE_ALONE.name]
    return [_line(name, samples, decode, encode) for name, samples in rounds.items() if samples]


def _line(name: str, own: Sequence[Sample], decode: Sequence[Sample], encode: Sequence[Sample]) -> Line:
    decodes = all(sample.gaps for sample in own)
    encodes = any(sample.images_per_second for sample in own)
    pairs, images = list(zip(own, decode, strict=True)), list(zip(own, encode, strict=True))
    return Line(
        name,
        Summary.of([sample.itl(0.5) for sample in own]) if decodes else None,
        Summary.of([sample.itl(0.99) for sample in own]) if decodes else None,
        Summary.of([sample.images_per_second for sample in own]) if encodes else None,
        statistics.median(ours.itl(0.5) / alone.itl(0.5) for ours, alone in pairs) if decodes else None,
        statistics.median(ours.itl(0.99) / alone.itl(0.99) for ours, alone in pairs) if decodes else None,
        statistics.median(a.images_per_second / b.images_per_second for a, b in images) if encodes else None,
    )


def table(found: Sequence[Line], refused: Mapping[str, str], gpu: str) -> Table:
    """Return the table for the screen: what meets the aim is green; what this machine cannot do says why."""
    shown = Table(title=f"an encoder beside decode on {gpu}", title_justify="left", title_style="bold")
    shown.add_column("")
    for column in ("ITL P50 ms", "of alone", "ITL P99 ms", "of alone", "images / s", "of alone"):
        shown.add_column(column, justify="right")
    for line in found:
        cells = (
            _number(line.itl_p50, 1e3),
            _ratio(line.itl_p50_ratio),
            _number(line.itl_p99, 1e3),
            _ratio(line.itl_p99_ratio),
            _number(line.images, 1.0),
            _ratio(line.images_ratio),
        )
        shown.add_row(line.variant, *cells, style="green" if line.meets_the_aim else None)
    for name, reason in refused.items():
        shown.add_row(name, reason, style="dim")
    return shown


def _number(summary: Summary | None, factor: float) -> str:
    return "" if summary is None else f"{summary.median * factor:.4g}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def record(found: Sequence[Line], refused: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the records of the result file, with times in seconds."""
    rows: list[dict[str, Any]] = []
    for line in found:
        row: dict[str, Any] = {"variant": line.variant}
        for key, summary in (("itl_p50", line.itl_p50), ("itl_p99", line.itl_p99), ("images", line.images)):
            if summary is not None:
                unit = "per_second" if key == "images" else "seconds"
                row[f"{key}_{unit}"] = summary.as_dict()
                row[f"{key}_of_alone"] = round(getattr(line, f"{key}_ratio"), 4)
        rows.append(row)
    return rows + [{"variant": name, "refused": reason} for name, reason in refused.items()]
