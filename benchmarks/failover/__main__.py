"""`python -m benchmarks.failover`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from random import Random

from benchmarks.failover import faults
from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.stages.__main__ import table
from dev.tiny_models.llama import write_llama


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    if not options.quick:
        wait_for_idle_machine(options)
    try:
        own = faults.run(
            write_llama(ROOT / ".models" / "llama"), options.rounds, Random(f"{options.seed} {faults.TASK}")
        )
    except ChildFailed as failure:
        raise SystemExit(f"{faults.TASK}: {failure}") from None
    console.print(table(faults.TASK, own))
    if not options.quick:
        workload = {"rounds": options.rounds}
        file = options.out / f"failover-{faults.TASK}.json"
        console.print(str(write_result(file, "failover", own, seed=options.seed, workload=workload)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="write nothing")
    add_common(parser, rounds=40, rounds_help="of faults")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
