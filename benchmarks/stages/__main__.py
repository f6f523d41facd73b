"""`python -m benchmarks.stages`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common, some_of
from benchmarks.harness.child import ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.stages import balance, death, merging, overhead, priority, throughput
from benchmarks.stages.settings import Settings

TASKS: dict[str, Callable[[Settings], list[dict[str, Any]]]] = {
    module.TASK: module.run for module in (merging, balance, death, priority, overhead, throughput)
}


def main(arguments: Sequence[str] | None = None) -> None:
    from dev.tiny_models.llama import write_llama

    options = parse(arguments)
    interrupt_on_terminate()
    if not options.quick:
        wait_for_idle_machine(options)
    rounds = 1 if options.quick else options.rounds
    settings = Settings(write_llama(ROOT / ".models" / "llama"), rounds, options.seed, options.pin)
    for task in options.tasks:
        try:
            own = TASKS[task](settings)
        except ChildFailed as failure:
            raise SystemExit(f"{task}: {failure}") from None
        console.print(table(task, own))
        if not options.quick:
            console.print(str(_write(options, task, own)))


def _write(options: argparse.Namespace, task: str, records: Sequence[dict[str, Any]]) -> Path:
    workload = {"rounds": options.rounds, "pinned": options.pin}
    return write_result(options.out / f"stages-{task}.json", "stages", records, seed=options.seed, workload=workload)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--tasks", type=some_of(TASKS, "task"), default=list(TASKS), help=f"of {','.join(TASKS)}")
    parser.add_argument(
        "--pin", action=argparse.BooleanOptionalAction, default=True, help="a core for each replica, in `balance`"
    )
    parser.add_argument("--quick", action="store_true", help="one round, and nothing is written: does it run?")
    add_common(parser, rounds=7, rounds_help="of each task; at most 5 deaths")
    return parser.parse_args(arguments)


def table(task: str, records: Sequence[dict[str, Any]]) -> Table:
    title = f"{task}: medians of {records[0]['ours']['samples']}, the most in (), quartiles of the ratio in []"
    shown = Table(title=title, title_justify="left")
    for column in ("", "stock", "ours", "of stock", "bar", ""):
        shown.add_column(column, justify="right" if column else "left")
    for one in records:
        ratio = (
            f"{one['of_stock']:.3f} [{one['of_stock_low']:.3f}, {one['of_stock_high']:.3f}]"
            if "of_stock" in one
            else ""
        )
        bar = f"{one['bar']:g} ({one['judged_by']})" if "bar" in one else ""
        met = {True: "met", False: "MISSED", None: ""}[one.get("met")]
        unit = "" if one["unit"] == "seconds" else f", {one['unit']}"
        shown.add_row(one["measure"] + unit, _cell(one.get("stock")), _cell(one["ours"]), ratio, bar, met)
    return shown


def _cell(summary: dict[str, float] | None) -> str:
    return f"{summary['median']:,.4g} ({summary['most']:,.4g})" if summary else ""


if __name__ == "__main__":
    main(sys.argv[1:])
