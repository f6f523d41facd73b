"""`python -m benchmarks.gpu.nvdec`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import name_of_gpu, write_gpu_result
from benchmarks.gpu.nvdec import CODECS
from benchmarks.gpu.nvdec.clips import Clip, embedded, made
from benchmarks.gpu.nvdec.crew import Crew, Refused, Task, tasks
from benchmarks.gpu.nvdec.driver import capabilities, libraries
from benchmarks.gpu.nvdec.report import CPU, NVDEC, Cell, Found, complaints, record, table
from benchmarks.harness.arguments import add_common, at_least_one, some_of
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.screen import console

NEEDED = ("PyNvVideoCodec", "av")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    gpu = name_of_gpu("gpu.nvdec")
    import torch

    interrupt_on_terminate()
    wait_for_idle_machine(options)
    torch.zeros(1, device="cuda")  # the driver answers whoever has a context
    asked = capabilities()
    gpus = options.engines or engines(asked, torch.cuda.device_count())

    def write(found: Found) -> Path:
        return write_gpu_result(
            options.out,
            "gpu.nvdec",
            gpu,
            record(found),
            {"count": torch.cuda.device_count()},
            seed=0,
            driver_says={"libraries": libraries(), "decoders": asked},
            installed={name: find_spec(name) is not None for name in NEEDED},
            workload={"seconds": options.seconds, "rounds": options.rounds, "videos": options.videos},
            tolerance="none: 8-bit 4:2:0 is compared in RGB, to the bit",
        )

    found = measure(options, clips(options), gpus, write)
    rows = record(found)
    console.print(table(rows, gpu))
    console.print(str(write(found)))
    if said := complaints(rows):
        raise SystemExit("; ".join(said))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.nvdec", description=__doc__)
    codecs = some_of(CODECS, "codec")
    parser.add_argument("--codecs", type=codecs, default=list(CODECS), help="separated by commas; default: all")
    parser.add_argument("--seconds", type=at_least_one, default=20, help="of a clip, 720p30")
    parser.add_argument("--videos", type=at_least_one, default=2, help="of each decoder, for videos per second")
    parser.add_argument("--engines", type=gpu_list, help="GPU of each, as 0,0,1,1; default: as the driver says")
    add_common(parser, rounds=5, seed=None)
    return parser.parse_args(arguments)


def gpu_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def engines(asked: dict[str, Any], gpus: int) -> list[int]:
    """Return the GPU of each engine, GPUs in turn; assume one engine where the driver does not tell."""
    each = max((told.get("engines", 0) for told in asked.values() if isinstance(told, dict)), default=0)
    return [gpu for _ in range(max(1, each)) for gpu in range(gpus)]


def clips(options: argparse.Namespace) -> list[Clip]:
    """Return the embedded clip and, where PyAV is installed, larger ones."""
    found = [embedded()]
    for codec in options.codecs if find_spec("av") else ():
        console.print(f"making a {codec} clip", highlight=False)
        try:
            found.append(made(codec, options.seconds))
        except ValueError as error:  # no such encoder in this build
            console.print(f"{codec}: {error}", highlight=False)
    return found


def measure(
    options: argparse.Namespace,
    videos: Sequence[Clip],
    gpus: Sequence[int],
    note: Callable[[Found], object] = lambda _: None,
) -> Found:
    """Measure every clip and task by 1 to all engines, then by the CPU; drop what refuses.

    Args:
        note: is given what is known so far after each clip, should the time run out.
    """
    found = Found()
    room = max(len(task.wanted) * clip.index.height * clip.index.width * 3 for clip in videos for task in tasks(clip))
    cores = len(os.sched_getaffinity(0))
    for kind, members in ((NVDEC, list(gpus)), (CPU, [0] * cores)):
        if kind == CPU and not find_spec("av"):
            found.refused["all", CPU] = "av is not installed"
            continue
        try:
            with Crew(kind, members, room) as crew:
                for clip in videos:
                    one_clip(options, found, crew, clip, len(members))
                    note(found)
        except Refused as error:
            found.refused["all", kind] = str(error)
    return found


def one_clip(options: argparse.Namespace, found: Found, crew: Crew, clip: Clip, members: int) -> None:
    try:
        for task in tasks(clip):
            crew.clear(clip, task)
            crew.latency(clip, task, members)  # warms up, and is compared
            compare(found, crew, clip, task)
            for _ in range(options.rounds):
                for count in counts(crew.kind, members):
                    cell = Cell(clip.name, task.name, crew.kind, count)
                    found.seconds.setdefault(cell, []).append(crew.latency(clip, task, count))
                    found.rates.setdefault(cell, []).append(crew.rate(clip, task, count, options.videos))
    except Refused as error:
        found.refused[clip.name, crew.kind] = str(error)
    console.print(f"{crew.kind}: {clip.name}", highlight=False)


def counts(kind: str, members: int) -> list[int]:
    """Return the numbers of decoders to measure: each number of engines, or one processor and all."""
    return list(range(1, members + 1)) if kind == NVDEC else sorted({1, members})


def compare(found: Found, crew: Crew, clip: Clip, task: Task) -> None:
    """Compare frames with those that the clip says; without any, NVDEC's with those of the CPU, which come later."""
    got = crew.digests(clip, task)
    right, kind = [clip.digests[n] for n in task.wanted] if clip.digests else [], crew.kind
    if not right and kind == NVDEC:
        _digests[clip.name, task.name] = got
    elif not right:
        right, kind = _digests.pop((clip.name, task.name), []), NVDEC
    if right:
        key = clip.name, f"{task.name}, {kind}"
        found.wrong[key] = len(right), sum(a != b for a, b in zip(got, right, strict=True))


_digests: dict[tuple[str, str], list[str]] = {}
"""NVDEC's, by clip and task, until the CPU has decoded the same."""


if __name__ == "__main__":
    main()
