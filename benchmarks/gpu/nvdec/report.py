"""What is made of the samples: medians, ratios, a table, the record. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from benchmarks.harness.stats import Summary, quantile

CPU = "cpu"
NVDEC = "nvdec"


@dataclass(frozen=True)
class Cell:
    """Names a clip, a task, a kind of decoder and the number of decoders that are measured together."""

    clip: str
    task: str
    kind: str
    members: int


@dataclass
class Found:
    """All that was measured: seconds of one video, videos per second, frames that are not the CPU's, and refusals."""

    seconds: dict[Cell, list[float]] = field(default_factory=dict)
    rates: dict[Cell, list[float]] = field(default_factory=dict)
    wrong: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)


def record(found: Found) -> list[dict[str, Any]]:
    """Return the records of the result file, with the ratios ``of_one`` and ``of_cpu`` (all CPU decoders) to it."""
    rows: list[dict[str, Any]] = []
    for cell, own in found.seconds.items():
        row: dict[str, Any] = {
            "clip": cell.clip,
            "task": cell.task,
            "decoder": cell.kind,
            "decoders": cell.members,
            "seconds": Summary.of(own).as_dict(),
        }
        if cell in found.rates:
            row["videos_per_second"] = Summary.of(found.rates[cell]).as_dict()
        for name, other in (("of_one", _one(cell)), ("of_cpu", _cpu(cell, found))):
            if other in found.seconds and other != cell:
                row[f"latency_{name}"] = _ratio(found.seconds[other], own)
            if other in found.rates and other != cell and cell in found.rates:
                row[f"rate_{name}"] = _ratio(found.rates[cell], found.rates[other])
        rows.append(row)
    rows += [
        {"clip": clip, "task": task, "compared": compared, "wrong": wrong}
        for (clip, task), (compared, wrong) in found.wrong.items()
    ]
    return rows + [{"clip": clip, "decoder": kind, "refused": why} for (clip, kind), why in found.refused.items()]


def table(rows: Sequence[Mapping[str, Any]], gpu: str) -> Table:
    """Return the table for the screen."""
    shown = Table(title=f"one video on the decoders of {gpu}", title_justify="left", title_style="bold")
    for column in ("clip", "task", "decoders", "ms", "× one", "× cpu", "videos/s", "× one", "× cpu"):
        shown.add_column(column, justify="left" if column in ("clip", "task") else "right")
    for row in rows:
        if "seconds" in row:
            rate = row.get("videos_per_second")
            shown.add_row(
                row["clip"],
                row["task"],
                f"{row['decoders']} {row['decoder']}",
                f"{row['seconds']['median'] * 1e3:,.1f}",
                *(_times(row, f"latency_of_{other}") for other in ("one", "cpu")),
                f"{rate['median']:,.2f}" if rate else "",
                *(_times(row, f"rate_of_{other}") for other in ("one", "cpu")),
            )
        elif "wrong" in row:
            said = f"{row['compared'] - row['wrong']} of {row['compared']} frames equal the CPU's"
            shown.add_row(row["clip"], row["task"], said, style="red" if row["wrong"] else None)
        else:
            shown.add_row(row["clip"], "", row["decoder"], row["refused"], style="dim")
    return shown


def complaints(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what must not be: pixels that differ, and a card that decodes nothing."""
    said = [f"{row['clip']}, {row['task']}: {row['wrong']} frames differ" for row in rows if row.get("wrong")]
    if not any(row.get("decoder") == NVDEC and "seconds" in row for row in rows):
        why = sorted({row["refused"] for row in rows if row.get("decoder") == NVDEC and "refused" in row})
        said.append(f"NVDEC decoded nothing: {'; '.join(why) or 'nothing was tried'}")
    return said


def _one(cell: Cell) -> Cell:
    return Cell(cell.clip, cell.task, cell.kind, 1)


def _cpu(cell: Cell, found: Found) -> Cell | None:
    alike = [other for other in found.seconds if (other.clip, other.task, other.kind) == (cell.clip, cell.task, CPU)]
    return max(alike, key=lambda other: other.members, default=None) if cell.kind != CPU else None


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return round(quantile([a / b for a, b in zip(above, below, strict=False)], 0.5), 3)


def _times(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.3g}" if name in row else ""
