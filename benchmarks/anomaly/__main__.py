"""`python -m benchmarks.anomaly`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.anomaly.faults import FAULTS
from benchmarks.harness.arguments import add_common
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from tests.support.monitored import LOADS

HOUR_SECONDS = 3600


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    records = [
        measure(fault, load, seed, options)
        for fault in options.faults
        for load in options.loads
        for seed in range(options.seeds)
    ]
    console.print(table(records))
    workload = {name: getattr(options, name) for name in ("healthy_hours", "fault_hours")}
    path = options.out / "anomaly.json"
    console.print(str(write_result(path, "anomaly", records, seed=0, workload=workload, simulated=True)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.anomaly", description=__doc__)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--healthy-hours", type=float, default=2.0, help="in which every alarm is false")
    parser.add_argument("--fault-hours", type=float, default=2.0, help="with the fault; before it, 1 to 1.5 without")
    add_common(parser, seed=None, timed=False)
    return parser.parse_args(arguments)


def measure(fault: str, load: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run once in health, and once with the fault."""
    healthy_seconds = options.healthy_hours * HOUR_SECONDS
    healthy = FAULTS[fault](load, random.Random(f"{fault} {load} {seed}"), healthy_seconds, math.inf)
    # so that a fault does not begin at the same point of each day
    fault_at = HOUR_SECONDS * random.Random(f"when {load} {seed}").uniform(1.0, 1.5)
    until = fault_at + options.fault_hours * HOUR_SECONDS
    ill = FAULTS[fault](load, random.Random(f"{fault} {load} {seed} ill"), until, fault_at)
    return {
        "fault": fault,
        "load": load,
        "seed": seed,
        "healthy_hours": options.healthy_hours,
        "looks": healthy.looks,
        "false_alarms": healthy.false,
        "false_alarms_before_fault": ill.false,
        "found_after_seconds": None if ill.found_at is None else ill.found_at - fault_at,
    }


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="Each detector beside healthy stages, and beside one with its fault", title_justify="left")
    for name in ("fault", "load", "hours", "false alarms", "found", "after (median)", "after (worst)"):
        shown.add_column(name, justify="left" if name in ("fault", "load") else "right")
    for fault in dict.fromkeys(one["fault"] for one in records):
        for load in dict.fromkeys(one["load"] for one in records):
            ones = [one for one in records if (one["fault"], one["load"]) == (fault, load)]
            after = [one["found_after_seconds"] for one in ones if one["found_after_seconds"] is not None]
            shown.add_row(
                fault,
                load,
                f"{sum(one['healthy_hours'] for one in ones):g}",
                str(sum(one["false_alarms"] for one in ones)),
                f"{len(after)} of {len(ones)}",
                f"{median(after):.0f} s" if after else "-",
                f"{max(after):.0f} s" if after else "-",
            )
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
