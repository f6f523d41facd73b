"""`python -m benchmarks.tiers`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, quantile
from benchmarks.tiers import BLOCKING, FAILING, TIERS, VARIANTS
from vllm_omni_sched.config.errors import NoRoomError
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.auto import AutoOptions, auto_transport
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.tiers import TiersOptions
from vllm_omni_sched.connectors.transport import Transport as Transport

EDGE = Edge("0", "1")
MIB = 1 << 20
WARM_UP = 8
PATIENCE_SECONDS = 60.0  # for a message that was put
LOOK_SECONDS = 1e-4  # between two looks for one that is about to move
SMALL_RING = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    wait_for_idle_machine(options)
    order, samples = random.Random(options.seed), dict[str, list[dict[str, float]]]()
    for turn in range(options.rounds):
        for variant in order.sample(list(VARIANTS), len(VARIANTS)):
            samples.setdefault(variant, []).append(burst(options, variant, turn))
        console.print(f"round {turn + 1} of {options.rounds}")
    records = record(samples)
    console.print(table(records))
    names = ("arena_mib", "message_mib", "burst", "pace_ms", "starts_after_ms")
    workload = {name: getattr(options, name) for name in names}
    path = options.out / "tiers.json"
    console.print(str(write_result(path, "tiers", records, seed=options.seed, workload=workload)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--arena-mib", type=int, default=64, help="what the arena holds")
    parser.add_argument("--message-mib", type=float, default=1.0)
    parser.add_argument("--burst", type=float, default=4.0, help="times what the arena holds")
    parser.add_argument("--pace-ms", type=float, default=5.0, help="between two messages that the receiver wants")
    parser.add_argument("--starts-after-ms", type=float, default=500.0, help="when it wants the first")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder on the disk")
    add_common(parser, rounds=9)
    return parser.parse_args(arguments)


def burst(options: argparse.Namespace, variant: str, turn: int) -> dict[str, float]:
    """Send one burst and get all of it, at the receiver's pace, in this process. Seconds, messages and bytes."""
    nbytes, held = int(options.message_mib * MIB), int(options.arena_mib * MIB)
    count, payload = int(options.burst * held / nbytes), np.random.default_rng(turn).random((1, nbytes // 8))
    puts, refused = list[float](), set[int]()
    put = threading.Semaphore(0)  # one more with each message that was put or refused
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
        closing(auto_transport(options_of(variant, shm, disk, held))) as path,
        ThreadPoolExecutor(1) as receiver,
    ):
        for _ in range(WARM_UP):
            path.put(make_message(EDGE, "warm", payload))
            assert path.get(EDGE, "warm") is not None
        receiving = receiver.submit(receive, path, count, payload, options, put, refused)
        for i in range(count):
            began = time.perf_counter()
            deadline = time.monotonic() + PATIENCE_SECONDS if variant == BLOCKING else None
            try:
                path.put(make_message(EDGE, f"{i}", payload), deadline)
            except NoRoomError:
                refused.add(i)
            puts.append(time.perf_counter() - began)
            put.release()
        facts = path.health().facts
        waits = receiving.result()
    return {
        "put P50": quantile(puts, 0.5),
        "put P99": quantile(puts, 0.99),
        "burst": sum(puts),
        "refused": float(len(refused)),
        "get P50": quantile(waits, 0.5),
        "get P99": quantile(waits, 0.99),
        "bytes on disk after the burst": float(facts.get("tiers", {}).get("tier_bytes", {}).get("disk", 0)),
    }


def receive(
    path: Transport,
    count: int,
    payload: np.ndarray,
    options: argparse.Namespace,
    put: threading.Semaphore,
    refused: set[int],
) -> list[float]:
    """Want one message after the other, each at its time or when it was put, whichever is later.

    Returns:
        Seconds that it waited for each message that was not refused.
    """
    waits, wanted_at = list[float](), time.perf_counter() + options.starts_after_ms / 1e3
    for i in range(count):
        if not put.acquire(timeout=PATIENCE_SECONDS):
            raise TimeoutError(f"message {i} was not put in {PATIENCE_SECONDS} s")
        time.sleep(max(0.0, wanted_at - time.perf_counter()))
        wanted_at = max(wanted_at, time.perf_counter()) + options.pace_ms / 1e3
        if i in refused:
            continue
        began = time.perf_counter()
        while (found := path.get(EDGE, f"{i}")) is None:
            if time.perf_counter() - began > PATIENCE_SECONDS:
                raise TimeoutError(f"message {i} did not come in {PATIENCE_SECONDS} s")
            time.sleep(LOOK_SECONDS)
        opened = found.open()
        waits.append(time.perf_counter() - began)
        if not np.array_equal(opened, payload):
            raise SystemExit(f"message {i} is not what was put")
        del found, opened
    return waits


def options_of(variant: str, shm: str, disk: str, held: int) -> AutoOptions:
    pool = {"block_bytes": 16384, "initial_bytes": held, "max_bytes": held}
    arena = {"directory": shm, "arena": "bench", "image": pool, "modality": "image", "ring_bytes": SMALL_RING}
    tiers = TiersOptions.model_validate({"disk": {"directory": disk, "max_bytes": 64 * held}})
    return AutoOptions(
        arena=ArenaOptions.model_validate(arena), tiers=None if variant in (FAILING, BLOCKING) else tiers
    )


def record(samples: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return, by variant and measure, the rounds and the median ratio of blocking to it round by round."""
    found = []
    for variant in VARIANTS:
        for measure in samples[variant][0]:
            own = [one[measure] for one in samples[variant]]
            entry = {"variant": variant, "measure": measure, **Summary.of(own).as_dict(9)}
            blocking = [one[measure] for one in samples[BLOCKING]]
            if variant == TIERS and measure in ("put P50", "put P99", "burst", "get P50", "get P99"):
                ratios = [a / b for a, b in zip(blocking, own, strict=True)]
                entry["blocking_over_it"] = round(quantile(ratios, 0.5), 3)
            found.append(entry)
    return found


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(
        title="ms, messages, MB; median of the rounds; × is how many times blocking takes", title_justify="left"
    )
    for column in ("", *VARIANTS):
        shown.add_column(column, justify="right")
    for measure in dict.fromkeys(entry["measure"] for entry in records):
        line = {entry["variant"]: entry for entry in records if entry["measure"] == measure}
        shown.add_row(measure, *(cell(line[variant]) for variant in VARIANTS))
    return shown


def cell(entry: dict[str, Any]) -> str:
    measure = entry["measure"]
    scale = 1e3 if measure.startswith(("put", "get", "burst")) else 1 / MIB if measure.startswith("bytes") else 1.0
    ratio = f" (×{entry['blocking_over_it']:.2g})" if "blocking_over_it" in entry else ""
    return f"{entry['median'] * scale:,.4g}{ratio}"


if __name__ == "__main__":
    main(sys.argv[1:])
