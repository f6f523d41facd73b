"""`python -m benchmarks.overhead`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.child import Child, interrupt_on_terminate
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary
from benchmarks.overhead import VARIANTS

Rounds = Mapping[str, Sequence[dict[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    model = options.model or tiny_model()
    rounds: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    order = random.Random(options.seed)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        engines = {}
        for variant in VARIANTS:
            engines[variant] = stack.enter_context(start(variant, model, options.python))
            version = engines[variant].next_event()["vllm"]
            console.print(f"{variant}: engine up", highlight=False)
        for turn in range(-1, options.rounds):  # the first one warms up
            # Engines take turns: a noisy moment of the machine hits no variant alone.
            for variant in order.sample(list(engines), len(engines)):
                answer = engines[variant].ask(do="round", requests=options.requests, tokens=options.tokens)
                if turn >= 0:
                    rounds[variant].append({key: value for key, value in answer.items() if key != "kind"})
    whole = min(map(len, rounds.values()))
    if not whole:
        raise SystemExit("no round was completed")
    rounds = {variant: answers[:whole] for variant, answers in rounds.items()}
    console.print(table(rounds, version))
    workload = {"requests": options.requests, "tokens": options.tokens, "model": "tiny LLaVA, text prompts"}
    path = write_result(
        options.out / f"overhead-{version}.json", "overhead", record(rounds), seed=options.seed, workload=workload
    )
    console.print(str(path))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--requests", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=192, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", help="any model; default: the tiny LLaVA")
    parser.add_argument("--python", default=sys.executable, help="interpreter whose vLLM is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(arguments)


def start(variant: str, model: Path, python: str) -> Child:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    if variant == "stock":
        environment["VLLM_PLUGINS"] = ""  # an empty allow-list: as if the plugin were not installed
    words = ["--model", str(model), "--variant", variant]
    return Child("benchmarks.overhead.serve", words, python=python, environment=environment)


METRICS: dict[str, Callable[[dict[str, Any]], float]] = {
    "tokens / s": lambda answer: answer["tokens_per_second"],
    "ITL P50 ms": lambda answer: answer["itl_seconds"]["median"] * 1e3,
    "ITL P99 ms": lambda answer: answer["itl_seconds"]["p99"] * 1e3,
    "TTFT P50 ms": lambda answer: answer["ttft_seconds"] * 1e3,
    "CPU µs / token, all processes": lambda answer: sum(answer["cpu_seconds_per_token"].values()) * 1e6,
    "CPU µs / token, engine core": lambda answer: (
        answer["cpu_seconds_per_token"].get("engine core", float("nan")) * 1e6
    ),
}


def table(rounds: Rounds, version: str) -> Table:
    """Medians over the rounds; the ratio is the median of the round-by-round ratios to stock."""
    shown = Table(title=f"text-only serving, vLLM {version}", title_justify="left", title_style="bold")
    shown.add_column("")
    for variant, meaning in VARIANTS.items():
        shown.add_column(f"{variant}\n{meaning}", justify="right")
        if variant != "stock":
            shown.add_column("of stock", justify="right")
    for name, read in METRICS.items():
        cells = []
        for variant in VARIANTS:
            cells.append(f"{statistics.median(map(read, rounds[variant])):.4g}")
            if variant != "stock":
                cells.append(f"{ratio(rounds, variant, read):.3f}")
        shown.add_row(name, *cells)
    return shown


def ratio(rounds: Rounds, variant: str, read: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(
        read(own) / read(stock) for own, stock in zip(rounds[variant], rounds["stock"], strict=True)
    )


def record(rounds: Rounds) -> list[dict[str, Any]]:
    return [
        {
            "variant": variant,
            "metric": name,
            **Summary.of([read(answer) for answer in rounds[variant]]).as_dict(4),
            "ratio_to_stock": round(ratio(rounds, variant, read), 4),
        }
        for variant in VARIANTS
        for name, read in METRICS.items()
    ]


def tiny_model() -> Path:
    from dev.tiny_models import write_llava

    return write_llava(ROOT / ".models" / "llava")


if __name__ == "__main__":
    main()
