"""`python -m benchmarks.preprocess`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image
from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.harness.server import Server, record
from benchmarks.harness.stats import quantile
from benchmarks.preprocess import OURS, SERVERS, STOCK, VARIANTS
from benchmarks.preprocess.probe import FOLDER, lags

MEASURES = (
    "event-loop lag P99",
    "text TTFT P50",
    "text TTFT P99",
    "picture TTFT P50",
    "picture TTFT P99",
    "seconds",
    "CPU seconds",
)
TEXT_SECONDS = 0.1  # between two text requests
Rounds = dict[str, list[dict[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    order = random.Random(options.seed)
    rounds: Rounds = {variant: [] for variant in VARIANTS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        questions = [
            [picture_url(folder, number, options) for number in range(at, at + options.pictures)]
            for at in range(0, options.requests * options.pictures, options.pictures)
        ]
        servers = {variant: PictureServer(stack, variant, folder, options) for variant in VARIANTS}
        for variant, server in servers.items():
            server.wait()
            asyncio.run(server.burst(questions[:4]))  # warm up
            console.print(f"{variant}: server up", highlight=False)
        for _ in range(options.rounds):
            for variant in order.sample(list(servers), len(servers)):
                rounds[variant].append(asyncio.run(servers[variant].burst(questions)))
        version = servers[STOCK].version()
    records = record(rounds, MEASURES)
    console.print(table(records))
    path = options.out / f"preprocess-{version}{'-inline' if options.inline else ''}.json"
    workload = {
        "requests at once": options.requests,
        "pictures of each": options.pictures,
        "size": f"{options.width}x{options.width * 3 // 4}",
        "sent": "in the request" if options.inline else "as files",
        "processes": options.processes,
    }
    console.print(
        str(write_result(path, "preprocess", records, seed=options.seed, python=options.python, workload=workload))
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preprocess", description=__doc__)
    parser.add_argument("--requests", type=int, default=16, help="with pictures, at once")
    parser.add_argument("--pictures", type=int, default=8, help="of each of these requests")
    parser.add_argument("--width", type=int, default=2048, help="of a picture, in pixels; the height is 3/4 of it")
    parser.add_argument("--processes", type=int, default=2, help="of our pool")
    parser.add_argument("--inline", action="store_true", help="send pictures in the requests, not as files")
    add_common(parser, rounds=5, python=True)
    return parser.parse_args(arguments)


def picture_url(folder: Path, number: int, options: argparse.Namespace) -> str:
    """Return the URL of a JPEG file like a photograph: smooth, with some noise."""
    rng = np.random.default_rng([options.seed, number])
    coarse = Image.fromarray(rng.integers(0, 255, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((options.width, options.width * 3 // 4), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(smooth + rng.integers(-8, 9, smooth.shape, dtype=np.int16), 0, 255).astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(noisy).save(data, "JPEG", quality=85)
    if options.inline:
        return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
    file = folder / f"{number}.jpg"
    file.write_bytes(data.getvalue())
    return f"file://{file}"


class PictureServer(Server):
    """Runs `vllm serve` on a tiny LLaVA of which a picture takes few tokens, so that the front end has most to do."""

    def __init__(self, stack: ExitStack, variant: str, folder: Path, options: argparse.Namespace) -> None:
        from dev.tiny_models import write_llava

        self._lags = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        words = ["--max-model-len", "2048", "--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"]
        words += ["--limit-mm-per-prompt", json.dumps({"image": options.pictures})]
        words += ["--allowed-local-media-path", str(folder), "--middleware", "benchmarks.preprocess.probe.Lag"]
        if variant == SERVERS:
            words += ["--api-server-count", "2"]
        if variant == OURS:
            pool = {"processes": options.processes}
            words += ["--scheduler-cls", "vllm_omni_sched.OmniScheduler"]
            words += ["--additional-config", json.dumps({"omni_sched": {"preprocess": pool}})]
        super().__init__(
            stack,
            options.python,
            write_llava(ROOT / ".models" / "llava-4-tokens", image_size=28),
            words,
            log=f"preprocess-{variant}",
            stock=variant != OURS,
            environment={"VLLM_CPU_KVCACHE_SPACE": "1", FOLDER: str(self._lags)},
        )

    async def burst(self, questions: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Send requests with pictures at the same moment, and text requests until they are answered."""
        texts: list[asyncio.Task[tuple[float, str]]] = []
        async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
            used = self._cpu_seconds()
            began = time.monotonic()
            pictures = asyncio.gather(*(self._ask(client, urls) for urls in questions))
            while not pictures.done():
                texts.append(asyncio.create_task(self._ask(client, ())))
                await asyncio.wait([pictures], timeout=TEXT_SECONDS)
            ended = time.monotonic()
            answers, beside = await pictures, await asyncio.gather(*texts)
            await asyncio.sleep(0.5)  # until the last lags are written
        first, text = [ttft for ttft, _ in answers], [ttft for ttft, _ in beside]
        return {
            "event-loop lag P99": quantile(lags(self._lags, began, ended), 0.99),
            "text TTFT P50": quantile(text, 0.5),
            "text TTFT P99": quantile(text, 0.99),
            "picture TTFT P50": quantile(first, 0.5),
            "picture TTFT P99": quantile(first, 0.99),
            "seconds": ended - began,
            "CPU seconds": self._cpu_seconds() - used,
            "answers": [words for _, words in answers],
        }

    def _cpu_seconds(self) -> float:
        """Return the processor time of all processes of the server so far."""
        server = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (server, *server.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    async def _ask(self, client: httpx.AsyncClient, urls: Sequence[str]) -> tuple[float, str]:
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content += [{"type": "text", "text": "what is there?"}]
        return await self.ask(client, content)


def table(records: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="seconds; × of stock", title_justify="left")
    for column in ("", *VARIANTS):
        shown.add_column(column, justify="right")
    for measure in MEASURES:
        line = {entry["variant"]: entry for entry in records if entry["measure"] == measure}
        cells = [
            f"{one['median']:.4f} ({one['least']:.4f}-{one['most']:.4f}) {one['of_stock']:.2f}" for one in line.values()
        ]
        shown.add_row(measure, *cells)
    same = {entry["variant"]: entry["same_answers"] for entry in records}
    shown.add_row("same answers", *("yes" if same[variant] else "no" for variant in VARIANTS))
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
