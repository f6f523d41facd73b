"""`python -m benchmarks.failover`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from random import Random

from benchmarks.failover import faults, preload
from benchmarks.harness.arguments import add_common, some_of
from benchmarks.harness.child import ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.stages.__main__ import table
from dev.tiny_models.llama import write_llama

TASKS = (faults.TASK, preload.TASK)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    if not options.quick:
        wait_for_idle_machine(options)
    for task in options.tasks:
        rng, workload = Random(f"{options.seed} {task}"), {"rounds": options.rounds}
        try:
            if task == faults.TASK:
                own = faults.run(write_llama(ROOT / ".models" / "llama"), options.rounds, rng)
            else:
                own, workload = preload.run(options.restarts, rng), {"restarts": options.restarts}
        except ChildFailed as failure:
            raise SystemExit(f"{task}: {failure}") from None
        console.print(table(task, own))
        if not options.quick:
            file = options.out / f"failover-{task}.json"
            console.print(str(write_result(file, "failover", own, seed=options.seed, workload=workload)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description=__doc__)
    parser.add_argument("--tasks", type=some_of(TASKS, "task"), default=list(TASKS), help=f"of {','.join(TASKS)}")
    parser.add_argument("--restarts", type=int, default=5, help="of a replica, with and without reading ahead")
    parser.add_argument("--quick", action="store_true", help="write nothing")
    add_common(parser, rounds=40, rounds_help="of faults")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
