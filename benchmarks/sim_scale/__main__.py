"""`python -m benchmarks.sim_scale`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.policy_cost.bench import Decision
from benchmarks.policy_cost.waiting import DECISIONS
from benchmarks.sim_scale.cases import Case, run
from benchmarks.sim_scale.plot import plot
from vllm_omni_sched.sim import compiled

_RATE = 4.0  # requests per second of each GPU
_SCALE = {10: 200.0, 100: 20.0, 1_000: 3.0, 10_000: 1.5}  # GPUs, simulated seconds
_RATES = (1.0, 2.0, 4.0, 8.0)
_GPUS = "gpus"
_SECOND = "cpu_seconds_per_simulated_second"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    part, seed = options.part, options.seed
    variants = ("stock", "ours")
    built, reason = compiled.find(os.environ.get(compiled.VARIABLE))
    ways = (False,) if built is None else (True, False)
    console.print(reason)
    cases = [
        [Case(one, gpus, _RATE, part * of, seed) for gpus, of in _SCALE.items() for one in variants],
        [
            Case(one, 100, rate, part * 40 / rate, seed, compiled=with_compiled)
            for with_compiled in ways
            for rate in _RATES
            for one in variants
        ],
        [Case(one, gpus, _RATE, part * of, seed, timed=True, compiled=False) for one, gpus, of in _TIMED],
    ]
    rounds = [[[alone(case) for case in own] for own in cases] for _ in range(options.rounds)]
    scale, rates, timed = [[median_run(runs) for runs in zip(*own, strict=True)] for own in zip(*rounds, strict=True)]
    exponents = {one: exponent(of(scale, one), _GPUS) for one in variants}
    by_rate = {one: exponent(of(rates[: len(rates) // len(ways)], one), "rate_per_gpu") for one in variants}
    held = [
        {"decision": one.name, "waiting": number, "median_us": median_us(one, number, seed, options.rounds)}
        for one in DECISIONS
        if one.barred
        for number in (100, 1_000, 10_000)
    ]
    console.print(table(scale))
    console.print(f"exponent against GPUs: {exponents}; against the rate: {by_rate}")
    results = {
        "scale": scale,
        "rates": rates,
        "decisions": [{key: row[key] for key in ("variant", "gpus", "decisions")} for row in timed],
        "exponent_by_gpus": exponents,
        "exponent_by_rate": by_rate,
        "waiting": held,
    }
    workload = {"part": part, "rounds": options.rounds}
    path = write_result(options.out / "sim_scale.json", "sim_scale", results, seed=seed, workload=workload)
    console.print(str(path))
    console.print(str(plot(path.with_suffix(".png"), scale, exponents)))


_TIMED = (("stock", 100, 10.0), ("ours", 100, 10.0), ("ours", 10_000, 0.5), ("gated", 8, 10.0))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim_scale", description=__doc__)
    parser.add_argument("--part", type=float, default=1.0, help="of the simulated seconds")
    add_common(parser, rounds=3, rounds_help="of all cases; of each the run in the middle")
    return parser.parse_args(arguments)


def alone(case: Case) -> dict[str, Any]:
    """Run a case in its own process, where nothing of the simulator is imported yet."""
    with multiprocessing.get_context("spawn").Pool(1, compiled.begin_worker, (case.compiled,)) as pool:
        found: dict[str, Any] = pool.apply(run, (case,))
    console.print(f"{found['variant']}, {found['gpus']} GPUs: {found['events_per_second']:,} events/s")
    return found


def median_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median run of one case (of two the quicker), with the ascending seconds of all runs."""
    ordered = sorted(runs, key=lambda one: one["cpu_seconds"])
    return {**ordered[(len(runs) - 1) // 2], "cpu_seconds_of_runs": [one["cpu_seconds"] for one in ordered]}


def of(rows: Sequence[Mapping[str, Any]], variant: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["variant"] == variant]


def median_us(decision: Decision, waiting: int, seed: int, rounds: int) -> float:
    """Return the median microseconds of a decision with so many requests waiting, as in ``policy_cost``."""
    taken = [decision.make(waiting, random.Random(seed)).seconds(500, 0.2) for _ in range(rounds)]
    return round(1e6 * statistics.median(map(statistics.median, taken)), 2)


def exponent(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Fit b of seconds = a x key^b by least squares of the logarithms."""
    across, up = [math.log(row[key]) for row in rows], [math.log(row[_SECOND]) for row in rows]
    return round(float(np.polyfit(across, up, 1)[0]), 3)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table(title="One core", title_justify="left", title_style="bold")
    for column in ("policies", "GPUs", "events", "events/s", "s per simulated s", "µs per request", "MiB"):
        shown.add_column(column, justify="left" if column == "policies" else "right")
    for row in rows:
        cells = [f"{row[key]:,}" for key in ("gpus", "events", "events_per_second", _SECOND)]
        shown.add_row(row["variant"], *cells, f"{row['cpu_us_per_request']:,.0f}", f"{row['peak_mib']:,}")
    return shown


if __name__ == "__main__":
    main()
