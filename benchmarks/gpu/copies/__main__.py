"""`python -m benchmarks.gpu.copies`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.gpu.copies import EMBEDS, FRAMES
from benchmarks.gpu.device import name_of_gpu, write_gpu_result
from benchmarks.harness.arguments import add_common, at_least_one
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.screen import console


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    gpu = name_of_gpu("gpu.copies")
    wait_for_idle_machine(options)
    rows = measure(options, "cuda")
    console.print(table(rows, gpu))
    path = write_gpu_result(
        options.out, "gpu.copies", gpu, rows, seed=options.seed, workload={"rounds": options.rounds}
    )
    console.print(str(path))
    if found := complaints(rows):
        raise SystemExit("; ".join(found))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.copies", description=__doc__)
    parser.add_argument("--embeds", type=numbers, default=list(EMBEDS), help="sizes of encodings")
    parser.add_argument("--frames", type=numbers, default=list(FRAMES), help="frames of 1280 x 720")
    parser.add_argument("--no-encode", action="store_true", help="leave the vision tower out")
    add_common(parser, rounds=20)
    return parser.parse_args(arguments)


def numbers(text: str) -> list[int]:
    return [at_least_one(part) for part in text.split(",") if part]


def measure(options: argparse.Namespace, device_name: str) -> list[dict[str, Any]]:
    """Return the rows of all tasks on this device."""
    import torch

    from benchmarks.gpu.copies.measure import encode, host_tier, stitch

    torch.manual_seed(options.seed)
    device = torch.device(device_name)
    rows = host_tier(options.embeds, options.rounds, device) + stitch(options.frames, options.rounds, device)
    return rows if options.no_encode else rows + encode(options.rounds, device)


def table(rows: Sequence[Mapping[str, Any]], gpu: str) -> Table:
    """Return the table for the screen: milliseconds, and GB/s."""
    shown = Table(title=f"copies on {gpu}", title_justify="left", title_style="bold")
    for column in ("task", "size", "", "ms", "GB/s", "wrong"):
        shown.add_column(column, justify="right")
    for row in rows:
        size = f"{row['frames']} frames" if "frames" in row else f"{row['embeds']} embeddings"
        for name, found in row.items():
            if not name.endswith("_seconds"):
                continue
            speed = f"{row['bytes'] / found['median'] / 1e9:.3g}" if row.get("bytes") and found["median"] else ""
            wrong = row.get("wrong", 0)
            what = name.removesuffix("_seconds")
            cells = (row["task"], size, what, f"{found['median'] * 1e3:.4g}", speed, str(wrong))
            shown.add_row(*cells, style="red" if wrong else None)
    return shown


def complaints(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what must not be: content that differs."""
    return [f"{row['task']}: {row['wrong']} wrong" for row in rows if row.get("wrong")]


if __name__ == "__main__":
    main()
