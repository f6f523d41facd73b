"""`python -m benchmarks.encoder_cache`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.encoder_cache import VARIANTS
from benchmarks.encoder_cache.trace import MIXES, Request, requests
from benchmarks.harness.arguments import add_common
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    records = []
    seeds = range(options.seed, options.seed + options.traces)
    for mix, embeds in itertools.product(MIXES, options.sizes):
        traces = [requests(MIXES[mix], options.conversations, options.rate, seed) for seed in seeds]
        columns = ("in cache", "in host", "encoded again, s", "first time, s", "restored, s")
        table = Table("variant", *columns, title=f"{mix}, {embeds:,} embeddings")
        for variant in VARIANTS:
            record = {"mix": mix, **measure(variant, embeds, options.host_bytes, traces)}
            records.append(record)
            spread = record["encoded_again_seconds"]
            table.add_row(
                variant,
                f"{record['device_share']['median']:.1%}",
                f"{record['host_share']['median']:.1%}",
                f"{spread['median']:.1f} ({spread['least']:.1f} to {spread['most']:.1f})",
                f"{record['first_seconds']['median']:.1f}",
                f"{record['restore_seconds']['median']:.2f}",
            )
        console.print(table)
    workload = {"conversations": options.conversations, "rate": options.rate, "host_bytes": options.host_bytes}
    note = "counts of a replay, and seconds by the assumed costs of trace.py: nothing was timed"
    path = write_result(
        options.out / "encoder_cache.json", "encoder_cache", records, seed=options.seed, workload=workload, note=note
    )
    console.print(str(path))


def measure(variant: str, embeds: int, host_bytes: int, traces: Sequence[Sequence[Request]]) -> dict[str, Any]:
    """Replay several traces and return the medians."""
    from benchmarks.encoder_cache.replay import Replay  # vLLM: not for --help

    runs = []
    for trace in traces:
        counts = Replay(variant, embeds, host_bytes).run(trace)
        runs.append({**asdict(counts), "lookups": counts.device + counts.host + counts.miss + counts.full})

    def of(values: Sequence[float]) -> dict[str, float]:
        return Summary.of(values).as_dict()

    return {
        "variant": variant,
        "cache_embeds": embeds,
        "lookups": of([run["lookups"] for run in runs]),
        "full": of([run["full"] for run in runs]),
        "device_share": of([run["device"] / run["lookups"] for run in runs]),
        "host_share": of([run["host"] / run["lookups"] for run in runs]),
        "first_seconds": of([run["first_seconds"] for run in runs]),
        "encoded_again_seconds": of([run["encode_seconds"] - run["first_seconds"] for run in runs]),
        "restore_seconds": of([run["restore_seconds"] for run in runs]),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoder_cache", description=__doc__)
    parser.add_argument("--sizes", type=_whole_numbers, default=[32768, 131072, 262144], help="capacities, a list")
    parser.add_argument("--host-bytes", type=int, default=2 << 30, help="of the variant with a host tier")
    parser.add_argument("--conversations", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=1.0, help="new conversations a second")
    parser.add_argument("--traces", type=int, default=5, help="of different seeds")
    add_common(parser, timed=False)
    return parser.parse_args(arguments)


def _whole_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
