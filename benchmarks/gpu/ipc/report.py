"""What is made of the samples: medians over rounds, bandwidth, ratios, a table, the record. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from benchmarks.gpu.ipc import THEIRS
from benchmarks.harness.stats import Summary, quantile

MEASURES = ("end to end", "P99", "put", "get")


@dataclass(frozen=True)
class Round:
    """Result of one size over one variant: seconds by measure, wrong tensors, timed tensors, and
    tensors that never left the device, warm-up included."""

    seconds: Mapping[str, float]
    wrong: int
    messages: int
    on_device: int


@dataclass
class Found:
    """All that was measured, by size and variant; and by variant how the order test ended."""

    rounds: dict[tuple[str, str], list[Round]] = field(default_factory=dict)
    order: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)


def a_round(sent: Mapping[str, Any], got: Mapping[str, Any]) -> Round:
    """Compute a round from the answers of both sides."""
    took = [end - begin for begin, end in zip(sent["begun"], got["got"], strict=True)]
    seconds = {
        "end to end": quantile(took, 0.5),
        "P99": quantile(took, 0.99),
        "put": quantile(sent["put"], 0.5),
        "get": quantile(got["get"], 0.5),
    }
    return Round(seconds, got["wrong"], len(took), sent["on_device"])


def record(found: Found, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the records of the result file; `theirs_over_it`: median ratio of vLLM-Omni's to it by round."""
    rows: list[dict[str, Any]] = []
    for (size, variant), rounds in found.rounds.items():
        theirs = found.rounds.get((size, THEIRS))
        for measure in MEASURES:
            own = [one.seconds[measure] for one in rounds]
            row = {"size": size, "variant": variant, "measure": measure, **Summary.of(own).as_dict(9)}
            if theirs is not None and variant != THEIRS:
                ratios = [a.seconds[measure] / b for a, b in zip(theirs, own, strict=False)]
                row["theirs_over_it"] = round(quantile(ratios, 0.5), 3)
            if measure == "end to end":
                row["gigabytes_per_second"] = round(sizes[size] / row["median"] / 1e9, 3)
                row["wrong"] = sum(one.wrong for one in rounds)
                row["through_host"] = sum(max(0, one.messages - one.on_device) for one in rounds)
            rows.append(row)
    rows += [{"variant": variant, "measure": "order", **counts} for variant, counts in found.order.items()]
    return rows + [{"size": s, "variant": v, "refused": why} for (s, v), why in found.refused.items()]


def table(rows: Sequence[Mapping[str, Any]], gpu: str) -> Table:
    """Return the table for the screen: microseconds at P50, GB/s, and the ratio of vLLM-Omni's to it."""
    shown = Table(title=f"one tensor between two processes on {gpu}", title_justify="left", title_style="bold")
    for column in ("", "", "µs", "P99 µs", "put µs", "get µs", "GB/s", "×", "wrong"):
        shown.add_column(column, justify="right")
    for (size, variant), cells in _by_cell(rows).items():
        whole = cells["end to end"]
        shown.add_row(
            size,
            variant,
            *(f"{cells[measure]['median'] * 1e6:,.4g}" for measure in MEASURES),
            f"{whole['gigabytes_per_second']:.4g}",
            f"{whole['theirs_over_it']:.3g}" if "theirs_over_it" in whole else "",
            str(whole["wrong"]),
            style="red" if whole["wrong"] else None,
        )
    for row in rows:
        if row.get("measure") == "order":
            said = f"{row['early']} of {row['messages']} put before the kernel had ended, {row['wrong']} wrong"
            shown.add_row("order", row["variant"], said, style="red" if row["wrong"] else None)
        if "refused" in row:
            shown.add_row(row["size"], row["variant"], row["refused"], style="dim")
    return shown


def complaints(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what must not be: wrong content, and tensors of the device transport that went through the host."""
    said = [f"{row['variant']}, {row.get('size', 'order')}: {row['wrong']} wrong" for row in rows if row.get("wrong")]
    return said + [
        f"{row['variant']}, {row['size']}: {row['through_host']} went through the host"
        for row in rows
        if row["variant"].startswith("cuda_ipc") and row.get("through_host")
    ]


def _by_cell(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
    cells: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("measure") in MEASURES:
            cells.setdefault((row["size"], row["variant"]), {})[row["measure"]] = row
    return cells
