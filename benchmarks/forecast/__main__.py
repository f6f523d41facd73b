"""`python -m benchmarks.forecast`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.forecast.online import follow
from benchmarks.forecast.patterns import PATTERNS, counts
from benchmarks.forecast.recorded import DAY_BINS, SOURCE, WINDOW_SECONDS, derive, read_arrivals
from benchmarks.harness.arguments import add_common
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from vllm_omni_sched.monitor.forecast.load import ForecastOptions

DAY_SECONDS = 86400
HORIZONS_SECONDS = (600.0, 3600.0)
"""The default of `monitoring.forecast.horizon_seconds`, and an hour."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.derive:
        console.print(str(derive(options.derive)))
    elif options.recorded:
        recorded(options)
    else:
        synthetic(options)


def synthetic(options: argparse.Namespace) -> None:
    """Score the forecast on arrivals that are made up by pattern."""
    season = round(DAY_SECONDS / options.bin_seconds)
    forecast = ForecastOptions(
        bin_seconds=options.bin_seconds,
        season_bins=season,
        horizon_seconds=options.horizon_seconds,
        refit_bins=season,
        seasons_kept=7,
    )
    records = [
        {"pattern": pattern, "seed": seed}
        | follow(
            counts(pattern, options.days * season, season, options.mean, seed), forecast, options.days * season // 2
        )
        for pattern in options.patterns
        for seed in range(options.seeds)
    ]
    console.print(table(records))
    workload = {name: getattr(options, name) for name in ("days", "bin_seconds", "horizon_seconds", "mean")}
    path = options.out / "forecast.json"
    console.print(str(write_result(path, "forecast", records, seed=0, workload=workload, simulated=True)))


def recorded(options: argparse.Namespace) -> None:
    """Score the forecast on the second half of the arrivals that ServeGen publishes, with the product's options.

    A bin is one of ServeGen's windows; the models are fitted every sixth of a day, as by default.
    """
    records = []
    for name, series in read_arrivals().items():
        for horizon in HORIZONS_SECONDS:
            forecast = ForecastOptions(
                bin_seconds=WINDOW_SECONDS,
                season_bins=DAY_BINS,
                horizon_seconds=horizon,
                refit_bins=DAY_BINS // 6,
            )
            found = follow(series, forecast, len(series) // 2)
            records.append({"pattern": name, "days": len(series) / DAY_BINS, "horizon_seconds": horizon, **found})
    console.print(recorded_table(records))
    path = options.out / "forecast-servegen.json"
    console.print(str(write_result(path, "forecast", records, seed=0, workload={"source": SOURCE})))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__)
    parser.add_argument("--patterns", nargs="+", choices=list(PATTERNS), default=list(PATTERNS))
    parser.add_argument("--days", type=int, default=14, help="the second half is scored")
    parser.add_argument("--bin-seconds", type=float, default=900.0)
    parser.add_argument("--horizon-seconds", type=float, default=3600.0)
    parser.add_argument("--mean", type=float, default=300.0, help="arrivals per bin")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recorded", action="store_true", help="instead: the arrivals that ServeGen publishes")
    parser.add_argument(
        "--derive", type=Path, metavar="DATA", help="write these arrivals again, from ServeGen's `data`"
    )
    add_common(parser, seed=None, timed=False)
    return parser.parse_args(arguments)


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="MASE an hour ahead, median of the seeds; x: ours by theirs", title_justify="left")
    for name in ("pattern", "ours", "naive", "seasonal naive", "x naive", "x seasonal", "WQL", "in 80%", "guarded"):
        shown.add_column(name, justify="left" if name == "pattern" else "right")
    for pattern in dict.fromkeys(one["pattern"] for one in records):
        ones = [one for one in records if one["pattern"] == pattern]
        mase = {name: median(one["mase"][name] for one in ones) for name in ("ours", "naive", "seasonal_naive")}
        ratio = [
            median(one["mase"]["ours"] / one["mase"][name] for one in ones) for name in ("naive", "seasonal_naive")
        ]
        guarded = median(sum(share for name, share in one["spoke"].items() if "guarded" in name) for one in ones)
        shown.add_row(
            pattern,
            *(f"{value:.2f}" for value in mase.values()),
            *(f"{value:.2f}" for value in ratio),
            f"{median(one['wql'] for one in ones):.3f}",
            f"{median(one['coverage'] for one in ones):.0%}",
            f"{guarded:.0%}",
        )
    return shown


def recorded_table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="arrivals of ServeGen, second half", title_justify="left")
    columns = ("MAPE ours", "naive", "seasonal", "WQL ours", "naive", "seasonal", "in 80%", "model")
    for name in ("category", "ahead", *columns):
        shown.add_column(name, justify="left" if name in ("category", "model") else "right")
    for one in records:
        mape = [one["mape"].get(name) for name in ("ours", "naive", "seasonal_naive")]
        wql = [one["wql"], one["naive_wql"], one.get("seasonal_naive_wql")]
        shown.add_row(
            one["pattern"],
            f"{one['horizon_seconds'] / 60:g} min",
            *("–" if value is None else f"{value:.1%}" for value in mape),
            *("–" if value is None else f"{value:.3f}" for value in wql),
            f"{one['coverage']:.0%}",
            next(iter(one["spoke"])),
        )
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
