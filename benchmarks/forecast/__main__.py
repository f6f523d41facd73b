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
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from vllm_omni_sched.monitor.forecast.load import ForecastOptions

DAY_SECONDS = 86400


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__)
    parser.add_argument("--patterns", nargs="+", choices=list(PATTERNS), default=list(PATTERNS))
    parser.add_argument("--days", type=int, default=14, help="the second half is scored")
    parser.add_argument("--bin-seconds", type=float, default=900.0)
    parser.add_argument("--horizon-seconds", type=float, default=3600.0)
    parser.add_argument("--mean", type=float, default=300.0, help="arrivals per bin")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
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


if __name__ == "__main__":
    main(sys.argv[1:])
