"""`python -m benchmarks.step_cost`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.step_cost import plot, report
from benchmarks.step_cost.measure import Cell, measure
from benchmarks.step_cost.variants import KINDS, Trees, Variant, choose

SIZES = (1, 1024, 4096, 16384, 32768)
# samples a round, and the sizes of a scenario that has its own (as `scenarios.py`, which needs vLLM to be imported)
SCENARIOS: dict[str, tuple[int, tuple[int, ...] | None]] = {
    "realtime_frame": (20, None),
    "decode": (50, None),
    "one_shot_prefill": (2, None),
    "abort": (2, None),
    "one_chunk": (5, None),
    "many_sessions": (5, (512,)),
    "text_decode": (100, (64,)),
    "text_prefill": (10, (64,)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    plan = [
        (scenario, size, count)
        for scenario in options.scenarios
        for count, own_sizes in [SCENARIOS[scenario]]
        for size in own_sizes or options.sizes
    ]
    trees = Trees(options.source, options.python)
    cells: list[Cell] = []
    with contextlib.ExitStack() as stack:
        rows = measure(
            start(trees, options, stack),
            plan,
            rounds=options.rounds,
            cell_seconds=options.cell_seconds,
            seed=options.seed,
            on_profile=show_profile if options.profile else None,
            progress=lambda what, size: console.print(f"  {what} {size:,}", style="dim", highlight=False),
        )
        try:
            for row in rows:
                cells += row
        except KeyboardInterrupt:
            console.print("stopped: what was measured so far")
    stem = options.out / ("step_cost" + "_sync" * options.sync)
    records = [cell.as_record() for cell in cells]
    write_result(stem.with_suffix(".json"), "step_cost", records, seed=options.seed, clock="thread CPU time")
    drawn = plot.draw(stem.with_suffix(".png"), cells)
    for table in (*report.tables(cells), report.bars_table(cells)):
        console.print(table)
    console.print(f"{stem}.json" + (", .png" if drawn else ""))


def start(trees: Trees, options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[Variant, Child]:
    """Start the workers of all variants at the same time; print and leave out one that cannot start."""
    workers: dict[Variant, Child] = {}
    for variant in options.variants:
        try:
            child = trees.start(variant, sync=options.sync)
        except (ImportError, OSError, RuntimeError, ValueError) as problem:
            console.print(f"[red]without {variant}[/]: {str(problem).splitlines()[-1]}")
        else:
            workers[variant] = stack.enter_context(child)
    for variant, child in list(workers.items()):
        try:
            up = child.next_event()
        except ChildFailed as problem:
            console.print(f"[red]without {variant}[/]: {str(problem).splitlines()[-1]}")
            del workers[variant]
        else:
            if up["vllm"].partition("+")[0] != variant.version:
                raise SystemExit(f"{variant}: the sources given say they are {up['vllm']}")
    console.print(f"{len(workers)} variants: {', '.join(map(str, workers))}")
    return workers


def show_profile(variant: Variant, scenario: str, size: int, lines: list[tuple[float, float, str]]) -> None:
    console.print(f"{variant}, {scenario} {size:,}: own ms and calls a sample", style="bold")
    for seconds, calls, function in lines:
        console.print(f"    {seconds * 1e3:8.4f} {calls:9.1f}  {function}", highlight=False, markup=False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_cost", description=__doc__)
    parser.add_argument("--sizes", type=whole_numbers, default=list(SIZES), help="items n, a list")
    parser.add_argument("--versions", type=words, help="vLLM versions; default: those of the README's picture")
    parser.add_argument("--kinds", type=words, default=list(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--scenarios", type=words, default=list(SCENARIOS), help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument(
        "--cell-seconds", type=float, default=2.0, help="CPU time after which an expensive cell has enough"
    )
    parser.add_argument("--sync", action="store_true", help="synchronous scheduling")
    parser.add_argument(
        "--runners",
        type=words,
        help="model runners that the scheduler works for, v1,v2; default: v1, and v2 too since vLLM 0.33, "
        "where the scheduler does more for it",
    )
    parser.add_argument("--profile", action="store_true", help="after each row show where the time of a sample goes")
    parser.add_argument("--source", type=version_and_folder, action="append", default=[], metavar="VERSION=FOLDER")
    add_common(parser, rounds=5, python=True)
    options = parser.parse_args(arguments)
    if unknown := set(options.scenarios) - SCENARIOS.keys():
        parser.error(f"unknown scenario {min(unknown)!r}; there are {', '.join(SCENARIOS)}")
    try:
        options.variants = choose(options.versions, options.kinds, options.runners)
    except ValueError as problem:
        parser.error(str(problem))
    options.source = dict(options.source)
    return options


def words(text: str) -> list[str]:
    return text.split(",")


def whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def version_and_folder(text: str) -> tuple[str, Path]:
    version, _, folder = text.partition("=")
    return version, Path(folder)


if __name__ == "__main__":
    main()
