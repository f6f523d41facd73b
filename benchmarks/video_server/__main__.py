"""`python -m benchmarks.video_server`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.harness.server import Server, record
from benchmarks.harness.stats import quantile
from benchmarks.video.clips import CACHE, SHORT, encoded
from benchmarks.video_server import MEDIA, OURS, STOCK

MEASURES = ("TTFT P50", "TTFT P99", "seconds")
Rounds = dict[str, list[dict[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    clips = [encoded(clip) for clip in SHORT]
    order = random.Random(options.seed)
    rounds: Rounds = {variant: [] for variant in MEDIA}
    with ExitStack() as stack:
        servers = {variant: VideoServer(stack, variant, options) for variant in MEDIA}
        for variant, server in servers.items():
            server.wait()
            asyncio.run(server.burst(clips, 2))  # warm up
            console.print(f"{variant}: server up", highlight=False)
        for _ in range(options.rounds):
            for variant in order.sample(list(servers), len(servers)):
                rounds[variant].append(asyncio.run(servers[variant].burst(clips, options.requests)))
        version = servers[STOCK].version()
    records = record(rounds, MEASURES)
    console.print(table(records))
    path = options.out / f"video_server-{version}{'-polling' if options.polling else ''}.json"
    workload = {"requests at once": options.requests, "frames": options.frames, "clips": [clip.name for clip in SHORT]}
    console.print(
        str(write_result(path, "video_server", records, seed=options.seed, python=options.python, workload=workload))
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.video_server", description=__doc__)
    parser.add_argument("--requests", type=int, default=16, help="at once")
    parser.add_argument("--frames", type=int, default=32, help="of each video")
    parser.add_argument("--polling", action="store_true", help="leave vLLM's worker polling between messages")
    add_common(parser, rounds=5, python=True)
    return parser.parse_args(arguments)


class VideoServer(Server):
    """Runs `vllm serve` on the tiny video model with the loader of a variant."""

    def __init__(self, stack: ExitStack, variant: str, options: argparse.Namespace) -> None:
        from dev.tiny_models import write_qwen2_vl

        media = {"video": {"num_frames": options.frames, **MEDIA[variant]}}
        words = ["--max-model-len", "8192", "--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"]
        words += ["--media-io-kwargs", json.dumps(media), "--allowed-local-media-path", str(CACHE)]
        super().__init__(
            stack,
            options.python,
            write_qwen2_vl(ROOT / ".models" / "qwen2-vl"),
            words,
            log=f"video_server-{variant}",
            stock=variant == STOCK,
            polling=options.polling,
            environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        )

    async def burst(self, clips: list[Path], requests: int) -> dict[str, Any]:
        """Send requests at the same moment; return quantiles of their time to first token, in seconds."""
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=requests)) as client:
            began = time.perf_counter()
            answers = await asyncio.gather(*(self._ask(client, clips[i % len(clips)]) for i in range(requests)))
            seconds = time.perf_counter() - began
        first = [ttft for ttft, _ in answers]
        return {
            "TTFT P50": quantile(first, 0.5),
            "TTFT P99": quantile(first, 0.99),
            "seconds": seconds,
            "answers": [text for _, text in answers],
        }

    async def _ask(self, client: httpx.AsyncClient, clip: Path) -> tuple[float, str]:
        video = {"type": "video_url", "video_url": {"url": f"file://{clip}"}}
        content = [video, {"type": "text", "text": "what happens here?"}]
        return await self.ask(client, content)


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="seconds, requests at once", title_justify="left")
    for column in ("", STOCK, OURS, "of stock", "same answers"):
        shown.add_column(column, justify="right")
    for measure in MEASURES:
        line = {entry["variant"]: entry for entry in records if entry["measure"] == measure}
        values = [f"{line[v]['median']:.3f} ({line[v]['least']:.3f}-{line[v]['most']:.3f})" for v in MEDIA]
        same = "yes" if line[OURS]["same_answers"] else "no"
        shown.add_row(measure, *values, f"{line[OURS]['of_stock']:.2f}", same)
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
