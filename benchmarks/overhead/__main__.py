"""`python -m benchmarks.overhead`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, median_interval
from benchmarks.overhead import VARIANTS

Rounds = Mapping[str, Sequence[dict[str, Any]]]

LARGEST_BOUND = 0.05  # a wider interval around 1 says too little to call it no difference


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    model = options.model or tiny_model()
    rounds: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    order = random.Random(options.seed)
    ended = "interrupted"
    started = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        engines = {}
        for variant in VARIANTS:
            engines[variant] = stack.enter_context(start(variant, model, options.python))
            version = engines[variant].next_event()["vllm"]
            console.print(f"{variant}: engine up", highlight=False)
        turn = -options.warm_up
        while not (reason := why_enough(rounds, turn, time.monotonic() - started, options)):
            # Engines take turns: a noisy moment of the machine hits no variant alone.
            for variant in order.sample(list(engines), len(engines)):
                answer = engines[variant].ask(do="round", requests=options.requests, tokens=options.tokens)
                if turn >= 0:
                    rounds[variant].append({key: value for key, value in answer.items() if key != "kind"})
            turn += 1
        ended = reason
    whole = min(map(len, rounds.values()))
    if not whole:
        raise SystemExit("no round was completed")
    rounds = {variant: answers[:whole] for variant, answers in rounds.items()}
    records = record(rounds)
    console.print(table(rounds, version))
    for one in records:
        if one["variant"] != "stock":
            console.print(f"{one['variant']}, {one['metric']}: {one['statement']}", highlight=False)
    console.print(f"{whole} rounds; {ended}")
    workload = {
        "requests": options.requests,
        "tokens": options.tokens,
        "model": "tiny LLaVA, text prompts",
        "rounds": whole,
        "ended": ended,
    }
    path = write_result(
        options.out / f"overhead-{version}.json",
        "overhead",
        records,
        seed=options.seed,
        python=options.python,
        workload=workload,
    )
    console.print(str(path))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--requests", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each")
    parser.add_argument("--min-rounds", type=int, default=20, help="after which a small spread may end the run")
    parser.add_argument("--max-rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600, help="wall time after which no round is begun")
    parser.add_argument(
        "--precision", type=float, default=0.02, help="half width of every interval at which the run ends"
    )
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that are thrown away")
    parser.add_argument("--model", help="any model; default: the tiny LLaVA")
    add_common(parser, python=True)
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


def why_enough(rounds: Rounds, turn: int, seconds: float, options: argparse.Namespace) -> str:
    """Return why no further round is needed, or "" while one is."""
    if turn >= options.max_rounds:
        return "all rounds were run"
    if seconds >= options.seconds and turn > 0:
        return "the time was over"
    if turn < options.min_rounds or turn % 5:
        return ""
    widths = [
        high - low
        for variant in VARIANTS
        for read in METRICS.values()
        if variant != "stock"
        for _, low, high in [compared(rounds, variant, read)]
    ]
    return "every interval was narrow enough" if max(widths) <= 2 * options.precision else ""


def compared(
    rounds: Rounds, variant: str, read: Callable[[dict[str, Any]], float], seed: int = 0
) -> tuple[float, float, float]:
    """Return the median ratio to stock by round, and the ends of its 95 % bootstrap interval over the rounds."""
    ratios = [read(own) / read(stock) for own, stock in zip(rounds[variant], rounds["stock"], strict=True)]
    return statistics.median(ratios), *median_interval(ratios, random.Random(seed))


def statement(low: float, high: float) -> str:
    """Return the statement that an interval of the ratio to stock allows."""
    bound = max(abs(low - 1), abs(high - 1))
    if low > 1 or high < 1:
        return f"differs from stock: {low - 1:+.1%} to {high - 1:+.1%}"
    if bound > LARGEST_BOUND:
        return f"not decided: {low - 1:+.1%} to {high - 1:+.1%}"
    return f"no difference seen; at most {bound:.1%}"


def table(rounds: Rounds, version: str) -> Table:
    """Medians over the rounds; beside them the median of the round-by-round ratios to stock, and its interval."""
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
                ratio, low, high = compared(rounds, variant, read)
                cells.append(f"{ratio:.3f} [{low:.3f}, {high:.3f}]")
        shown.add_row(name, *cells)
    return shown


def record(rounds: Rounds) -> list[dict[str, Any]]:
    records = []
    for variant in VARIANTS:
        for name, read in METRICS.items():
            ratio, low, high = compared(rounds, variant, read)
            one = {
                "variant": variant,
                "metric": name,
                **Summary.of([read(answer) for answer in rounds[variant]]).as_dict(4),
                "ratio_to_stock": round(ratio, 4),
            }
            if variant != "stock":
                one |= {"ratio_interval": [round(low, 4), round(high, 4)], "statement": statement(low, high)}
            records.append(one)
    return records


def tiny_model() -> Path:
    from dev.tiny_models import write_llava

    return write_llava(ROOT / ".models" / "llava")


if __name__ == "__main__":
    main()
