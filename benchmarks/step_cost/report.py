"""The table on the screen, and the bars the project has set itself."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.harness.stats import fitted_exponent
from benchmarks.step_cost.measure import Cell
from benchmarks.step_cost.variants import Variant

TITLES = {
    "realtime_frame": "one more frame of a realtime session that holds n items, ms",
    "decode": "one decode step of a request that held n items, ms",
    "one_shot_prefill": "a prompt of n items, all its steps, ms",
    "abort": "abort with min(n, 8192) items cached, ms",
    "one_chunk": "schedule() of one 64-token chunk, n items pending, ms",
    "many_sessions": "64 sessions of n items, one frame each, ms a round",
    "text_decode": "decode step of n plain text requests, ms",
    "text_prefill": "prefill of n plain text prompts of 512 tokens, ms",
    "message_bytes": "worker message of a session update at n items, bytes",
}


@dataclass(frozen=True)
class Bar:
    """An upper bound: seconds (or bytes) at `size`, or an `exponent`, or a `ratio` to stock of the same version."""

    scenario: str
    size: int | None = None
    limit: float | None = None
    exponent: float | None = None
    ratio: float | None = None


BARS = (
    Bar("realtime_frame", size=32768, limit=0.15e-3),
    Bar("realtime_frame", exponent=0.10),
    Bar("many_sessions", size=512, limit=3.0e-3),
    Bar("one_shot_prefill", size=32768, limit=0.200),
    Bar("one_shot_prefill", exponent=1.05),
    Bar("abort", size=32768, limit=5e-3),
    Bar("decode", size=32768, ratio=1.0),
    Bar("message_bytes", size=32768, limit=8192),
    Bar("text_decode", size=64, ratio=1.02),
    Bar("text_prefill", size=64, ratio=1.02),
)


def tables(cells: Sequence[Cell]) -> Iterable[Table]:
    """Make one table per scenario: variants down, sizes across, fitted exponent, ratio to stock at the largest size."""
    for scenario, title in TITLES.items():
        here = [cell for cell in cells if cell.scenario == scenario]
        if not here:
            continue
        sizes = sorted({cell.size for cell in here})
        table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
        table.add_column("vLLM")
        table.add_column("")
        for size in sizes:
            table.add_column(f"{size:,}", justify="right")
        table.add_column("e", justify="right")
        table.add_column("of stock", justify="right")
        for variant in dict.fromkeys(cell.variant for cell in here):
            own = {cell.size: cell for cell in here if cell.variant == variant}
            exponent = exponent_of(here, variant)
            ratio = ratio_to_stock(here, variant, sizes[-1])
            table.add_row(
                variant.version,
                variant.label,
                *(shown(own[size]) if size in own else "–" for size in sizes),
                "" if exponent is None else f"{exponent:.2f}",
                "" if ratio is None else f"{ratio:.3f}",
                style="bold" if variant.kind == "ours" else None,
            )
        yield table


def bars_table(cells: Sequence[Cell]) -> Table:
    """Ours against each bar, on every version that was run."""
    table = Table(title="bars", title_justify="left", title_style="bold")
    for name in ("scenario", "bar", "vLLM", "measured", ""):
        table.add_column(name)
    ours = dict.fromkeys(cell.variant for cell in cells if cell.variant.kind == "ours")
    for bar in BARS:
        for variant in ours:
            here = [cell for cell in cells if cell.scenario == bar.scenario]
            limit, measured = against(bar, here, variant)
            if measured is not None:
                verdict = "met" if measured <= limit else "[bold red]missed[/]"
                table.add_row(bar.scenario, wording(bar), str(variant).partition(":")[2], f"{measured:.4g}", verdict)
    return table


def against(bar: Bar, cells: Sequence[Cell], variant: Variant) -> tuple[float, float | None]:
    """(limit, what was measured) in the bar's own unit; None where it was not."""
    if bar.exponent is not None:
        return bar.exponent, exponent_of(cells, variant)
    if bar.ratio is not None:
        assert bar.size is not None
        return bar.ratio, ratio_to_stock(cells, variant, bar.size)
    assert bar.limit is not None
    scale = 1.0 if bar.scenario == "message_bytes" else 1e3
    found = find(cells, variant, bar.size)
    return bar.limit * scale, None if found is None else found.summary.median * scale


def wording(bar: Bar) -> str:
    if bar.exponent is not None:
        return f"exponent ≤ {bar.exponent}"
    if bar.ratio is not None:
        return f"≤ {bar.ratio} of stock"
    assert bar.limit is not None
    unit = f"{bar.limit:.0f} bytes" if bar.scenario == "message_bytes" else f"{bar.limit * 1e3:g} ms"
    return f"≤ {unit} at {bar.size:,}"


def shown(cell: Cell) -> str:
    median = cell.summary.median
    return f"{median:,.0f}" if cell.scenario == "message_bytes" else f"{median * 1e3:.3g}"


def exponent_of(cells: Sequence[Cell], variant: Variant) -> float | None:
    return fitted_exponent({cell.size: cell.summary.median for cell in cells if cell.variant == variant})


def ratio_to_stock(cells: Sequence[Cell], variant: Variant, size: int) -> float | None:
    """Median over the rounds of ours / stock within a round: what slowed both down in one round cancels."""
    own, stock = find(cells, variant, size), find(cells, variant.stock(), size)
    if own is None or stock is None or own is stock:
        return None
    return statistics.median(a / b for a, b in zip(own.rounds, stock.rounds, strict=False))


def find(cells: Sequence[Cell], variant: Variant, size: int | None) -> Cell | None:
    return next((cell for cell in cells if cell.variant == variant and cell.size == size), None)
