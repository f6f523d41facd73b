"""`python -m benchmarks.mooncake`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, quantile
from benchmarks.mooncake import OURS, SIZES, THEIRS
from tests.support.mooncake import Deployment, why_not

MESSAGES = {"1 MB": 60, "4 MB": 30, "16 MB": 12, "64 MB": 6}  # of a round
WARM_UP = 3
MEASURES = ("put and get", "P99", "put", "get")

Sides = dict[str, tuple[Child, Child]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if reason := why_not():
        raise SystemExit(f"cannot measure here: {reason}")
    interrupt_on_terminate()
    order = random.Random(options.seed)
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        sides: Sides = {side: open_side(stack, side) for side in (OURS, THEIRS)}
        (version,) = {child.next_event()["vllm_omni"] for pair in sides.values() for child in pair}
        for turn in range(options.rounds):
            for size in options.sizes:
                try:
                    found = one_round(sides, size, turn, order)
                except ChildFailed as failure:
                    raise SystemExit(f"{size}: {failure}") from None
                for side, measures in found.items():
                    samples.setdefault((size, side), []).append(measures)
            console.print(f"round {turn + 1} of {options.rounds}")
    records = record(samples)
    console.print(table(records))
    path = options.out / f"mooncake-omni-{version.split('+')[0]}.json"
    workload = {"messages of a round": MESSAGES}
    console.print(str(write_result(path, "mooncake", records, seed=options.seed, workload=workload)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mooncake", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE")
    add_common(parser, rounds=5)
    return parser.parse_args(arguments)


def open_side(stack: ExitStack, side: str) -> tuple[Child, Child]:
    """Start sender and receiver with their own master: else vLLM-Omni's would put into the segments of ours."""
    deployment = stack.enter_context(Deployment())
    with deployment.inside():
        arguments = [side, deployment.master.address]
        first, second = (stack.enter_context(Child("benchmarks.mooncake.peer", arguments)) for _ in range(2))
    return first, second


def one_round(sides: Sides, size: str, turn: int, order: random.Random) -> dict[str, dict[str, float]]:
    """Messages of one size, one after the other, the sides in turns; seconds, P50 but for P99."""
    took: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(WARM_UP + MESSAGES[size]):
        for side in order.sample(list(sides), len(sides)):
            request = {"key": f"{size}-{turn}-{number}", "nbytes": SIZES[size]}
            sender, receiver = sides[side]
            put = sender.ask(do="put", **request)["seconds"]
            took[side].append((put, receiver.ask(do="get", **request)["seconds"]))
    found = {}
    for side, both in took.items():
        puts, gets = zip(*both[WARM_UP:], strict=True)
        total = [put + get for put, get in both[WARM_UP:]]
        values = (quantile(total, 0.5), quantile(total, 0.99), quantile(puts, 0.5), quantile(gets, 0.5))
        found[side] = dict(zip(MEASURES, values, strict=True))
    return found


def record(samples: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return, per size, side and measure, the rounds and the median ratio of vLLM-Omni's connector to ours."""
    found = []
    for (size, side), rounds in samples.items():
        for measure in MEASURES:
            own = [one[measure] for one in rounds]
            entry = {"size": size, "variant": side, "measure": measure, **Summary.of(own).as_dict(9)}
            if side == OURS:
                theirs = [one[measure] for one in samples[size, THEIRS]]
                entry["theirs_over_it"] = round(quantile([a / b for a, b in zip(theirs, own, strict=True)], 0.5), 3)
            found.append(entry)
    return found


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="one message, milliseconds at P50; × is how many times theirs takes", title_justify="left")
    for column in ("", "", THEIRS, OURS):
        shown.add_column(column, justify="right")
    for size in dict.fromkeys(entry["size"] for entry in records):
        for measure in MEASURES:
            line = {e["variant"]: e for e in records if (e["size"], e["measure"]) == (size, measure)}
            ratio = f" (×{line[OURS]['theirs_over_it']:.2f})"
            theirs, ours = (f"{line[side]['median'] * 1e3:,.3g}" for side in (THEIRS, OURS))
            shown.add_row(size if measure == MEASURES[0] else "", measure, theirs, ours + ratio)
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
