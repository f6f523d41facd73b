"""`python -m benchmarks.policy_cost`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, fitted_exponent
from benchmarks.policy_cost import BAR_MICROSECONDS
from benchmarks.policy_cost.bench import Decision
from benchmarks.policy_cost.others import DECISIONS as OTHERS
from benchmarks.policy_cost.placing import DECISIONS as PLACING
from benchmarks.policy_cost.waiting import DECISIONS as ABOUT_WAITING

DECISIONS = {one.name: one for one in (*ABOUT_WAITING, *PLACING, *OTHERS)}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    wait_for_idle_machine(options)
    records = [measure(DECISIONS[name], options) for name in options.decisions]
    console.print(table(records))
    workload = {name: getattr(options, name) for name in ("samples", "most", "most_seconds")}
    path = options.out / "policy_cost.json"
    console.print(str(write_result(path, "policy_cost", records, seed=options.seed, workload=workload)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy_cost", description=__doc__)
    parser.add_argument("--decisions", nargs="+", choices=list(DECISIONS), default=list(DECISIONS))
    parser.add_argument("--most", type=int, default=10_000, help="sizes above it are left out, but for the least")
    parser.add_argument("--samples", type=int, default=2000, help="decisions of each size")
    parser.add_argument("--most-seconds", type=float, default=0.5, help="for those of one size; fewer samples then")
    add_common(parser)
    return parser.parse_args(arguments)


def measure(decision: Decision, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each size; the exponent is fitted over all sizes."""
    sizes = [size for size in decision.sizes if size <= max(options.most, decision.sizes[0])]
    found = {}
    for size in sizes:
        bench = decision.make(size, random.Random(f"{decision.name} {size} {options.seed}"))
        taken = bench.seconds(options.samples, options.most_seconds)
        found[size] = Summary.of([1e6 * seconds for seconds in taken])
    return {
        "decision": decision.name,
        "grows_with": decision.grows_with,
        "microseconds": {str(size): one.as_dict(3) for size, one in found.items()},
        "exponent": fitted_exponent({size: one.median for size, one in found.items()}, smallest=1),
        "bar_microseconds": BAR_MICROSECONDS if decision.barred else None,
    }


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="Median microseconds of one decision, from the least size to the largest", title_justify="left")
    for name in ("decision", "grows with", "sizes", "µs", "e", f"within {BAR_MICROSECONDS:g} µs"):
        shown.add_column(name, justify="left" if name in ("decision", "grows with") else "right")
    for one in records:
        medians = [each["median"] for each in one["microseconds"].values()]
        bar, exponent = one["bar_microseconds"], one["exponent"]
        shown.add_row(
            one["decision"],
            one["grows_with"],
            " ".join(f"{int(size):,}" for size in one["microseconds"]),
            " ".join(f"{median:,.1f}" for median in medians),
            "-" if exponent is None else f"{exponent:.2f}",
            "" if bar is None else "yes" if medians[-1] <= bar else "NO",
        )
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
