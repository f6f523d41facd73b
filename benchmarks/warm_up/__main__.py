"""`python -m benchmarks.warm_up`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary
from benchmarks.mixed.__main__ import checked_json, slow_model
from benchmarks.warm_up import VARIANTS


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    model = options.model or slow_model()
    order = random.Random(options.seed)
    ttfts: dict[str, list[list[float]]] = {}
    digests: dict[str, list[list[str]]] = {}
    version = "?"
    for turn in range(options.rounds):
        for variant in order.sample(options.variants, len(options.variants)):
            words = ["--model", str(model), "--variant", variant, "--options", options.options]
            words += ["--seed", str(options.seed + turn), *(["--beside"] if options.beside else [])]
            environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
            environment |= {"VLLM_PLUGINS": ""} if variant == "stock" else {}
            with Child("benchmarks.warm_up.serve", words, python=options.python, environment=environment) as child:
                try:
                    events = list(child.events())
                except ChildFailed as failure:
                    raise SystemExit(f"{variant}: {failure}") from None
            images = [event for event in events if event["kind"] == "image"]
            version = events[-1]["vllm"]
            ttfts.setdefault(variant, []).append([event["ttft"] * 1e3 for event in images])
            digests.setdefault(variant, []).append([event["digest"] for event in images])
            console.print(f"{variant}: first {images[0]['ttft'] * 1e3:.0f} ms, last {images[-1]['ttft'] * 1e3:.0f} ms")
    console.print(table(ttfts))
    same = all(digests[variant] == digests[options.variants[0]] for variant in options.variants)
    console.print(f"same tokens in all variants: {'yes' if same else 'NO'}")
    name = f"warm_up-{version}{'-beside' if options.beside else ''}.json"
    workload = {"beside": options.beside, "options": options.options, "same_tokens": same}
    path = write_result(
        options.out / name, "warm_up", record(ttfts), seed=options.seed, python=options.python, workload=workload
    )
    console.print(str(path))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_up", description=__doc__)
    parser.add_argument("--beside", action="store_true", help="a text request decodes meanwhile: items go to the lane")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--options", default="{}", help="more of our options, as JSON", type=checked_json)
    parser.add_argument("--model", help="default: the tiny LLaVA with a slow tower")
    add_common(parser, rounds=5, python=True)
    return parser.parse_args(arguments)


def ratios(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the TTFT of the first request over that of the last, for each start of the engine."""
    return [of_one[0] / of_one[-1] for of_one in rounds]


def table(ttfts: dict[str, list[list[float]]]) -> Table:
    shown = Table(title="TTFT after a start, ms", title_justify="left", title_style="bold")
    for column in ("variant", "first", "second", "last", "first / last"):
        shown.add_column(column, justify="left" if column == "variant" else "right")
    for variant, rounds in ttfts.items():
        found = ratios(rounds)
        cells = [f"{statistics.median(of_one[i] for of_one in rounds):.0f}" for i in (0, 1, -1)]
        shown.add_row(variant, *cells, f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})")
    return shown


def record(ttfts: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    found = []
    for variant, rounds in ttfts.items():
        for i in range(len(rounds[0])):
            summary = Summary.of([of_one[i] for of_one in rounds]).as_dict(3)
            found.append({"variant": variant, "measure": f"TTFT ms of request {i + 1}", **summary})
        found.append({"variant": variant, "measure": "first / last", **Summary.of(ratios(rounds)).as_dict(3)})
    return found


if __name__ == "__main__":
    main()
