"""`python -m benchmarks.gpu`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.gpu.device import name_of_gpu, write_gpu_result
from benchmarks.gpu.page import picture
from benchmarks.gpu.parts import Ended, Machine, Outcome, parts
from benchmarks.gpu.runner import run
from benchmarks.gpu.verdicts import Advice, Finding, findings
from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.screen import console

NEEDED = ("PyNvVideoCodec", "av", "vllm")
NAMES = [part.name for part in parts(Machine("", 0))]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    gpu = name_of_gpu("gpu")
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    chosen = [part for part in parts(machine(gpu), options.minutes) if part.name in options.parts]
    ended: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        for part in chosen:
            console.print(f"{part.name}: {part.question} (at most {part.seconds:.0f} s)", highlight=False)
            ended.append(run(part, Path(scratch) / part.name))
            console.print(f"  {ended[-1].outcome.value} {ended[-1].reason}", highlight=False)
            write(options.out, gpu, ended)  # what is known so far, should the machine be taken away
    path = write(options.out, gpu, ended)
    found = findings(rows_of(ended))
    console.print(table(found, gpu))
    console.print(str(path))
    try:
        console.print(str(picture(path.with_suffix(".png"), ended, found, gpu)))
    except ImportError:
        console.print("no picture: matplotlib is missing")
    if all(one.outcome in (Outcome.SKIPPED, Outcome.FAILED) for one in ended):
        raise SystemExit("no part has a result: the reasons are above")
    if wrong := [one for one in found if one.advice is Advice.FIX]:
        raise SystemExit("; ".join(f"{one.option}: {one.why}" for one in wrong))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=minutes, default=10.0, help="for all parts together")
    parser.add_argument("--parts", type=names, default=NAMES, help=f"of {','.join(NAMES)}; default: all, in this order")
    add_common(parser, seed=None)
    return parser.parse_args(arguments)


def minutes(text: str) -> float:
    found = float(text)
    if not 1.0 <= found <= 240.0:
        raise argparse.ArgumentTypeError(f"must be from 1 to 240 minutes, got {found:g}")
    return found


def names(text: str) -> list[str]:
    found = [part for part in text.split(",") if part]
    for name in found:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"unknown part {name!r}: known are {', '.join(NAMES)}")
    return found


def machine(gpu: str) -> Machine:
    """Return what this machine has."""
    import torch

    installed = frozenset(name for name in NEEDED if find_spec(name) is not None)
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return Machine(gpu, int(torch.cuda.get_device_properties(0).total_memory), installed, shared)


def rows_of(ended: Sequence[Ended]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Return the rows of the parts that the rules know, by part."""
    return {one.part.name: one.rows for one in ended if isinstance(one.rows, list)}


def write(folder: Path, gpu: str, ended: Sequence[Ended]) -> Path:
    """Write the result file: each part with its results, and the findings."""
    found = [one.as_dict() for one in findings(rows_of(ended))]
    records = {"parts": [one.record() for one in ended], "findings": found}
    return write_gpu_result(folder, "gpu", gpu, json.loads(json.dumps(records)), seed=0)


def table(found: Sequence[Finding], gpu: str) -> Table:
    """Return the table for the screen: what the figures would change in the defaults."""
    shown = Table(title=f"what {gpu} would change in the defaults", title_justify="left", title_style="bold")
    for column in ("option", "now", "then", "why"):
        shown.add_column(column)
    styles = {Advice.CHANGE: "green", Advice.FIX: "red", Advice.KEEP: None}
    for one in found:
        shown.add_row(one.option, one.now, one.then, one.why, style=styles[one.advice])
    return shown


if __name__ == "__main__":
    main()
