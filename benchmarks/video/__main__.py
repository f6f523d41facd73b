"""`python -m benchmarks.video`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, quantile
from benchmarks.video import FFMPEG, OURS, STOCK, VARIANTS
from benchmarks.video.clips import LONG, SHORT, Clip, encoded

Samples = dict[tuple[str, str, str], list[dict[str, Any]]]


@dataclass(frozen=True)
class Task:
    """A task of a loader: its options, the number of concurrent requests, and the number of processors (0: all)."""

    options: dict[str, int]
    requests: int = 1
    cores: int = 0
    variants: tuple[str, ...] = (STOCK, FFMPEG, OURS)


TASKS = {
    "32 frames": Task({"num_frames": 32}),
    "32 frames, 1 core": Task({"num_frames": 32}, cores=1, variants=(STOCK, OURS)),
    "1 fps": Task({"num_frames": -1, "fps": 1}),
    "all frames": Task({"num_frames": -1}, variants=VARIANTS),
    "16 requests": Task({"num_frames": 32}, requests=16, variants=(STOCK, OURS)),
}
SHORT_ONES = "h264-360p"  # what "16 requests" loads


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    order = random.Random(options.seed)
    samples: Samples = {}
    plan = [(task, clip) for task in options.tasks for clip in clips_of(task, options.clips)]
    for clip in dict.fromkeys(one for task, name in plan for one in files_of(TASKS[task], name)):
        if not clip.path.exists():
            console.print(f"encoding {clip.name}: {clip.seconds} s of {clip.width}x{clip.height}", highlight=False)
        encoded(clip)
    version = "?"
    for task, clip in plan:
        with ExitStack() as stack:  # new processes for each task, so that no memory of an earlier task counts
            sides: dict[str, Child] = {}
            for variant in TASKS[task].variants:
                words = ["--variant", variant, "--cores", str(TASKS[task].cores)]
                sides[variant] = stack.enter_context(Child("benchmarks.video.peer", words, python=options.python))
                version = sides[variant].next_event()["vllm"].split("+")[0]
            try:
                found = one_task(sides, task, clip, options.rounds, order)
            except ChildFailed as failure:
                raise SystemExit(f"{task} of {clip}: {failure}") from None
        samples |= {(task, clip, variant): rounds for variant, rounds in found.items()}
        console.print(line(task, clip, found), highlight=False)
    records = record(samples)
    console.print(table(records))
    path = options.out / f"video-{version}{options.name}.json"
    workload = {"tasks": options.tasks, "clips": options.clips, "rounds": options.rounds}
    console.print(
        str(write_result(path, "video", records, seed=options.seed, python=options.python, workload=workload))
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.video", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--clips", nargs="+", choices=LONG, default=["h264-gop60"], metavar="CLIP")
    add_common(parser, rounds=5, python=True, name=True)
    return parser.parse_args(arguments)


def clips_of(task: str, long: list[str]) -> list[str]:
    return [SHORT_ONES] if TASKS[task].requests > 1 else long


def files_of(task: Task, clip: str) -> list[Clip]:
    return [SHORT[n % len(SHORT)] for n in range(task.requests)] if clip == SHORT_ONES else [LONG[clip]]


def one_task(
    sides: dict[str, Child], name: str, clip: str, rounds: int, order: random.Random
) -> dict[str, list[dict[str, Any]]]:
    """Run each variant once a round, in random order, after one load that warms up and measures peak memory."""
    task = TASKS[name]
    paths = [str(encoded(one)) for one in files_of(task, clip)]
    request: dict[str, Any] = {"do": "load", "clips": paths, "options": task.options}
    found: dict[str, list[dict[str, Any]]] = {}
    peaks = {}
    for variant in task.variants:
        peaks[variant] = sides[variant].ask(**request, memory=True)["peak_bytes"]
    for _ in range(rounds):
        for variant in order.sample(list(task.variants), len(task.variants)):
            answer = sides[variant].ask(**request)
            found.setdefault(variant, []).append({**answer, "peak_bytes": peaks[variant]})
    return {variant: found[variant] for variant in task.variants}


def record(samples: Samples) -> list[dict[str, Any]]:
    """Return seconds, ratios to stock and FFmpeg, memory, and equality of frames, by task, clip and variant."""
    found = []
    for (task, clip, variant), rounds in samples.items():
        seconds = [one["seconds"] for one in rounds]
        base = samples[task, clip, STOCK]
        last = rounds[-1]
        entry = {
            "task": task,
            "clip": clip,
            "variant": variant,
            **Summary.of(seconds).as_dict(4),
            "cpu_seconds": round(quantile([one["cpu_seconds"] for one in rounds], 0.5), 3),
            "frames": last["frames"],
            "same_frames_as_stock": all(one["digest"] == base[-1]["digest"] for one in rounds),
            "peak_over_output": round(last["peak_bytes"] / last["nbytes"], 3) if last["nbytes"] else None,
        }
        for other in (STOCK, FFMPEG):
            if variant != other and (task, clip, other) in samples:
                theirs = [one["seconds"] for one in samples[task, clip, other]]
                ratios = [a / b for a, b in zip(theirs, seconds, strict=True)]
                entry[f"{other.lower()}_over_it"] = round(quantile(ratios, 0.5), 3)
        found.append(entry)
    return found


def line(task: str, clip: str, found: dict[str, list[dict[str, Any]]]) -> str:
    medians = {variant: quantile([one["seconds"] for one in rounds], 0.5) for variant, rounds in found.items()}
    return f"{task} of {clip}: " + ", ".join(f"{variant} {seconds:.3f} s" for variant, seconds in medians.items())


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="seconds; × is how many times as long stock takes", title_justify="left")
    for column in ("task", "clip", "", "seconds", "×", "× FFmpeg", "CPU s", "frames", "same", "memory / output"):
        shown.add_column(column, justify="left" if column in ("task", "clip", "") else "right")
    for entry in records:
        shown.add_row(
            *(str(entry[name]) for name in ("task", "clip", "variant")),
            f"{entry['median']:.3f} ({entry['least']:.3f}-{entry['most']:.3f})",
            f"{entry['stock_over_it']:.2f}" if "stock_over_it" in entry else "",
            f"{entry['ffmpeg_over_it']:.2f}" if "ffmpeg_over_it" in entry else "",
            f"{entry['cpu_seconds']:.2f}",
            str(entry["frames"]),
            "yes" if entry["same_frames_as_stock"] else "no",
            f"{entry['peak_over_output']:.2f}" if entry["peak_over_output"] is not None else "",
        )
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
