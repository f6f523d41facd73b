"""One request at a time: nothing to merge, to order or to balance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.stages import OURS, STOCK, VARIANTS
from benchmarks.stages.load import alike
from benchmarks.stages.pair import Turn
from benchmarks.stages.record import Bar, different, entry, latencies
from benchmarks.stages.settings import Settings

TASK = "overhead"
REQUESTS, SEQS = 5, 8
TURNS = 6  # of each round; many short turns meet the same moments of the machine
EVERYTHING: dict[str, Any] = {
    "runtime": {
        "connectors": {"shared": {"name": "SharedMemoryConnector"}},  # as the deploy YAML has it
        "recovery": {"hang_seconds": 60.0},
        "credits": {"enabled": True},
    },
    "batching": {"target_latency_ms": 50, "progressive": {"enabled": True}},
    "graph": {"partition": {"enabled": True, "devices": {"0": {"memory_bytes": 1 << 44}}}},  # where all stages are
    "monitoring": {
        "anomaly": {"enabled": True},
        "forecast": {"enabled": True, "bin_seconds": 5.0, "season_bins": 12, "horizon_seconds": 5.0},
    },
}
"""What is on by default, and on top of it all that is off and can be on where there is nothing to gain.

Each bin and each look of the partition is within a turn now and then. Not `forecast.move_replicas`: requests that come
one at a time leave a replica of the second stage to spare, which it would stop.
"""


def run(settings: Settings) -> list[dict[str, Any]]:
    rng = settings.rng(TASK)
    with settings.pair(SEQS, EVERYTHING) as pair:
        turns = []
        for number in range(-TURNS, settings.rounds * TURNS):
            turn = pair.turn(alike(REQUESTS, rng, thinks=12, says=24), rng, together=False)
            if number >= 0:  # those before warm up
                turns.append(turn)
    return record(turns)


def record(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    found = []
    for label, q in (("median", statistics.median), ("sum", sum)):
        values = {name: [q(latencies(turn[name])) for turn in turns] for name in VARIANTS}
        bar = Bar(1.03) if label == "median" else None
        found.append(entry(TASK, f"latency of {REQUESTS} requests, {label}", values[OURS], values[STOCK], bar=bar))
    found[0]["of_stock_in_total"] = round(_overall(turns, OURS) / _overall(turns, STOCK), 4)
    cpu = {name: [sum(turn[name]["cpu_seconds"].values()) for turn in turns] for name in VARIANTS}
    found.append(entry(TASK, f"CPU time of {REQUESTS} requests", cpu[OURS], cpu[STOCK]))
    front = {name: [turn[name]["cpu_seconds"]["front end"] for turn in turns] for name in VARIANTS}
    found.append(entry(TASK, f"CPU time of {REQUESTS} requests, front end", front[OURS], front[STOCK]))
    others = [different(turn[OURS], turn[STOCK]) for turn in turns]
    found.append(entry(TASK, "answers other than stock's", others, unit="answers"))
    return found


def _overall(turns: Sequence[Turn], name: str) -> float:
    return statistics.median(each for turn in turns for each in latencies(turn[name]))
