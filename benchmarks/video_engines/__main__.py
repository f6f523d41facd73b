"""`python -m benchmarks.video_engines`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.video_engines.model import Shape, index_of, seconds_until_done
from vllm_omni_sched.video.plan import Rates

ENGINES = (1, 2, 4, 7, 14, 28, 56)  # one GPU of the paper's has seven
TASKS = {"all frames": 0, "32 frames": 32}  # 0: all
GOPS = (30, 60, 250)
HANDOVER_SECONDS = 1e-3  # for each piece


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    pixels = Shape().width * Shape().height
    rates = Rates(per_pixel=1 / (options.engine_fps * pixels), per_byte=0.0, per_piece=HANDOVER_SECONDS)
    records = [
        outcome(task, gop, videos, engines, rates)
        for task in TASKS
        for gop in GOPS
        for videos in (1, options.videos)
        for engines in ENGINES
    ]
    for videos in (1, options.videos):
        console.print(table([one for one in records if one["videos"] == videos]))
    workload = {"engine_fps": options.engine_fps, "handover_seconds": HANDOVER_SECONDS, "video": vars(Shape())}
    path = options.out / "video_engines.json"
    console.print(str(write_result(path, "video_engines", records, seed=0, workload=workload, simulated=True)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.video_engines", description=__doc__)
    parser.add_argument(
        "--engine-fps", type=float, default=700.0, help="frames of 1920x1080 that one engine decodes in a second"
    )
    parser.add_argument("--videos", type=int, default=16, help="at once, beside one one_engine")
    add_common(parser, seed=None)
    return parser.parse_args(arguments)


def outcome(task: str, gop: int, videos: int, engines: int, rates: Rates) -> dict[str, Any]:
    index = index_of(Shape(gop=gop))
    total = len(index.packets)
    wanted = np.linspace(0, total - 1, TASKS[task] or total, dtype=int).tolist()
    one_engine = seconds_until_done(index, wanted, 1, videos, rates)
    all_engines = seconds_until_done(index, wanted, engines, videos, rates)
    return {
        "task": task,
        "gop": gop,
        "videos": videos,
        "engines": engines,
        "first_done_seconds": round(all_engines[0], 6),
        "all_done_seconds": round(all_engines[-1], 6),
        "speedup": round(one_engine[-1] / all_engines[-1], 3),
    }


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"{records[0]['videos']} video(s): times as fast as with one engine", title_justify="left")
    shown.add_column("task")
    shown.add_column("GOP", justify="right")
    for engines in ENGINES:
        shown.add_column(str(engines), justify="right")
    for key in dict.fromkeys((one["task"], one["gop"]) for one in records):
        line = [one for one in records if (one["task"], one["gop"]) == key]
        shown.add_row(key[0], str(key[1]), *(f"{one['speedup']:.2f}" for one in line))
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
