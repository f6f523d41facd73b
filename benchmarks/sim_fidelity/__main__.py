"""`python -m benchmarks.sim_fidelity`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import add_common, some_of
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.mixed import VARIANTS
from benchmarks.sim_fidelity import pipeline


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    pipeline.run(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim_fidelity", description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals in a wave")
    parser.add_argument("--variants", type=some_of(VARIANTS, "variant"), default=["stock", "ours"])
    parser.add_argument("--measured", type=Path, help="use these waves, and measure none")
    parser.add_argument("--keep", type=Path, help="keep the measured waves here, for --measured")
    add_common(
        parser,
        rounds=6,
        rounds_help="of each load",
        seed=100,
        seed_help="of the first round; the calibration has other data",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
