"""`python -m benchmarks.tiers`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, quantile
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.auto import AutoOptions, auto_path
from vllm_omni_sched.connectors.base import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.tiers import TiersOptions
from vllm_omni_sched.errors import NoRoomError

EDGE = Edge("0", "1")
MIB = 1 << 20
VARIANTS = ("without tiers", "with tiers")
WARM_UP = 8
PATIENCE_SECONDS = 60  # for a message that was put
SMALL_RING = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    order, samples = random.Random(options.seed), dict[str, list[dict[str, float]]]()
    for turn in range(options.rounds):
        for variant in order.sample(VARIANTS, len(VARIANTS)):
            samples.setdefault(variant, []).append(burst(options, variant, turn))
        console.print(f"round {turn + 1} of {options.rounds}")
    records = [
        {"variant": variant, "measure": measure, **Summary.of([one[measure] for one in samples[variant]]).as_dict(9)}
        for variant in VARIANTS
        for measure in samples[variant][0]
    ]
    console.print(table(records))
    workload = {"arena_mib": options.arena_mib, "message_mib": options.message_mib, "burst": options.burst}
    path = options.out / "tiers.json"
    console.print(str(write_result(path, "tiers", records, seed=options.seed, workload=workload)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arena-mib", type=int, default=256, help="what the arena holds")
    parser.add_argument("--message-mib", type=float, default=1.0)
    parser.add_argument("--burst", type=float, default=4.0, help="times what the arena holds")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder on the disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(arguments)


def burst(options: argparse.Namespace, variant: str, turn: int) -> dict[str, float]:
    """One burst, of which nothing is got before its end; then all of it is. Seconds, messages and bytes."""
    nbytes, held = int(options.message_mib * MIB), int(options.arena_mib * MIB)
    count, payload = int(options.burst * held / nbytes), np.random.default_rng(turn).random((1, nbytes // 8))
    took, refused = list[float](), set[int]()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, tempfile.TemporaryDirectory(dir=options.disk) as disk:
        path = auto_path(options_of(variant, shm, disk, held))
        for _ in range(WARM_UP):
            path.put(make_message(EDGE, "warm", payload))
            assert path.get(EDGE, "warm") is not None
        for i in range(count):
            began = time.perf_counter()
            try:
                path.put(make_message(EDGE, f"{i}", payload))
            except NoRoomError:
                refused.add(i)
            took.append(time.perf_counter() - began)
        facts = path.health().facts
        tiers = facts.get("tier_bytes", {"arena": facts.get("arena", {}).get("in_flight", 0) * nbytes, "disk": 0})
        gets = list[float]()
        for i in range(count):
            began = time.perf_counter()
            while i not in refused and (found := path.get(EDGE, f"{i}")) is None:
                if time.perf_counter() - began > PATIENCE_SECONDS:
                    raise TimeoutError(f"message {i} did not come in {PATIENCE_SECONDS} s")
                time.sleep(1e-4)  # it was about to move
            if i not in refused:
                assert np.array_equal(found.open(), payload)
                gets.append(time.perf_counter() - began)
                del found
        moves = float(sum(facts.get("moved", {}).values()))
        path.close()
    return {
        "put P50": quantile(took, 0.5),
        "put P99": quantile(took, 0.99),
        "get P50": quantile(gets, 0.5),
        "refused": float(len(refused)),
        "bytes in the arena": float(tiers["arena"]),
        "bytes on disk": float(tiers["disk"]),
        "moves": moves,
    }


def options_of(variant: str, shm: str, disk: str, held: int) -> AutoOptions:
    pool = {"block_bytes": 16384, "initial_bytes": held, "max_bytes": held}
    arena = {"directory": shm, "arena": "bench", "image": pool, "modality": "image", "ring_bytes": SMALL_RING}
    tiers = TiersOptions.model_validate({"disk": {"directory": disk, "max_bytes": 64 * held}})
    return AutoOptions(arena=ArenaOptions.model_validate(arena), tiers=tiers if variant == "with tiers" else None)


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="one burst: ms, messages, MB; median of the rounds", title_justify="left")
    for column in ("", *VARIANTS):
        shown.add_column(column, justify="right")
    for measure in dict.fromkeys(entry["measure"] for entry in records):
        scale = 1e3 if measure.startswith(("put", "get")) else 1 / MIB if measure.startswith("bytes") else 1.0
        line = {entry["variant"]: entry for entry in records if entry["measure"] == measure}
        cells = [f"{line[variant]['median'] * scale:,.4g}" for variant in VARIANTS]
        shown.add_row(measure, *cells)
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
