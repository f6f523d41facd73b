"""Stop a server, processes and all, while another one is measured: a server that polls would disturb it."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.processes import OtherProcesses, role_of
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.server import Server
from benchmarks.harness.stats import quantile
from benchmarks.streaming import VARIANTS
from benchmarks.streaming.client import Stream, request_id, streams
from benchmarks.streaming.probe import FOLDER, sent

API_SERVER, CLIENT = "API server", "client"
ROLES = (API_SERVER, "engine core", "worker", CLIENT)
CPU, READY = "CPU ms / token", "ready ms / token"
BURST_SECONDS = 1e-4
"""A token that comes so soon after the one before has waited for it somewhere: no step is as short."""
MEASURES = (
    "ITL P50 ms",
    "ITL P99 ms",
    "in bursts %",
    "sent: ITL P99 ms",
    "sent: in bursts %",
    "step ms",
    "TTFT P50 ms",
    "tokens / s",
    *(f"{kind}, {role}" for kind in (CPU, READY) for role in ROLES),
)
WORDS = (
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "64",
    "--no-enable-prefix-caching",
    "--mm-processor-cache-gb",
    "0",
)
SETTLE_SECONDS = 0.1  # until the API server has counted the last tokens
WARM_TOKENS = 32
NAME = "measured"


class StreamServer(Server):
    """Runs `vllm serve` for one variant on a tiny LLaVA."""

    def __init__(self, stack: ExitStack, variant: str, model: Path, python: str) -> None:
        chosen = VARIANTS[variant]
        self._sent = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        super().__init__(
            stack,
            python,
            model,
            [*WORDS, "--middleware", "benchmarks.streaming.probe.Sent", *chosen.words],
            log=f"streaming-{variant}",
            stock=chosen.stock,
            polling=chosen.polling,
            environment={"VLLM_CPU_KVCACHE_SPACE": "1", FOLDER: str(self._sent), **chosen.environment},
        )
        stack.callback(self.resume)  # a stopped process would not end when asked to

    def round(self, number: int, tokens: int) -> dict[str, Any]:
        """Stream so many completions at once, each of so many tokens; return `MEASURES` and the tokens."""
        streams(self.url, number, WARM_TOKENS, "warm-up")
        steps = self._steps()
        watch = OtherProcesses()
        before = self._used()
        found = streams(self.url, number, tokens, NAME)
        used = {measure: seconds - before[measure] for measure, seconds in self._used().items()}
        others = watch.share()
        time.sleep(SETTLE_SECONDS)
        counted = [after - at for at, after in zip(steps, self._steps(), strict=True)]
        return measured(found, sent(self._sent), used, counted[0] / counted[1]) | {"other cores": others}

    def _steps(self) -> tuple[float, float]:
        """Return the sum of the times between tokens so far, in seconds in the engine core, and their number."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = {"sum": 0.0, "count": 0.0}
        for family in text_string_to_metric_families(text):
            if family.name == "vllm:inter_token_latency_seconds":
                for sample in family.samples:
                    if (which := sample.name.removeprefix(f"{family.name}_")) in found:
                        found[which] += sample.value
        return found["sum"], found["count"]

    def _used(self) -> dict[str, float]:
        """Return the seconds so far for which this process and those of the server have run, and were ready to run.

        By measure, in which a role stands for all its processes. A process is ready when it waits for a core.
        """
        root = psutil.Process(self.process.pid)
        processes = [(API_SERVER, root), (CLIENT, psutil.Process())]
        processes += [(role_of(one) or API_SERVER, one) for one in root.children(recursive=True)]
        found = dict.fromkeys((f"{kind}, {role}" for kind in (CPU, READY) for role in ROLES), 0.0)
        for role, process in processes:
            for schedstat in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with suppress(OSError):  # the thread has ended
                    ran, waited, _ = schedstat.read_text().split()
                    found[f"{CPU}, {role}"] += int(ran) / 1e9
                    found[f"{READY}, {role}"] += int(waited) / 1e9
        return found


def measured(
    found: Sequence[Stream], events: Mapping[str, Sequence[float]], used: Mapping[str, float], step: float
) -> dict[str, Any]:
    """Return `MEASURES` of a round, its tokens, and when those of the first stream came.

    Args:
        events: when the API server has sent each event of each stream; what follows the last token may be among them.
        used: seconds by measure, for those that are a time by token.
        step: the mean time between tokens of a request in the engine core, in seconds.
    """
    gaps = [gap for stream in found for gap in stream.gaps()]
    before = [
        gap for at, stream in enumerate(found) for gap in stream.gaps(events[request_id(NAME, at)][: len(stream.at)])
    ]
    tokens = sum(len(stream.token_ids) for stream in found)
    seconds = max(stream.at[-1] for stream in found) - min(stream.sent for stream in found)
    return {
        "ITL P50 ms": 1e3 * quantile(gaps, 0.5),
        "ITL P99 ms": 1e3 * quantile(gaps, 0.99),
        "in bursts %": _in_bursts(gaps),
        "sent: ITL P99 ms": 1e3 * quantile(before, 0.99),
        "sent: in bursts %": _in_bursts(before),
        "step ms": 1e3 * step,
        "TTFT P50 ms": 1e3 * quantile([stream.ttft for stream in found], 0.5),
        "tokens / s": tokens / seconds,
        **{measure: 1e3 * seconds / tokens for measure, seconds in used.items()},
        "answers": [stream.token_ids for stream in found],
        "arrivals": [round(at - found[0].at[0], 6) for at in found[0].at],
    }


def _in_bursts(gaps: Sequence[float]) -> float:
    return 100 * sum(gap < BURST_SECONDS for gap in gaps) / len(gaps)


def model_of(layers: int) -> Path:
    """Write the model and return its folder."""
    from dev.tiny_models import write_llava

    return write_llava(ROOT / ".models" / f"llava-{layers}-layers", llm_layers=layers)


def server_of(stack: ExitStack, variant: str, options: argparse.Namespace) -> StreamServer:
    """Start the server of a variant, and return it when it answers."""
    server = StreamServer(stack, variant, options.model or model_of(options.layers), options.python)
    server.wait()
    return server
