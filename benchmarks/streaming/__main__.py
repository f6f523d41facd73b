"""`python -m benchmarks.streaming`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.backtest import MODEL, QUIET_CORES
from benchmarks.harness.arguments import add_common, at_least_one, at_least_two, some_of
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.server import record
from benchmarks.streaming import DEFAULT, STOCK, VARIANTS
from benchmarks.streaming.plot import draw
from benchmarks.streaming.server import MEASURES, server_of

DRAWN = "in bursts %"
Rounds = dict[tuple[int, str], list[dict[str, Any]]]
"""The rounds by number of streams and variant."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.draw:
        console.print(str(draw(options.draw.with_suffix(".png"), json.loads(options.draw.read_text())["results"])))
        return
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    order = random.Random(options.seed)
    rounds: Rounds = {}
    version = "?"
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        servers = {}
        for variant in options.variants:
            servers[variant] = server_of(stack, variant, options)
            servers[variant].round(max(options.streams), options.tokens)  # warm up
            version = servers[variant].version()
            servers[variant].pause()
            console.print(f"{variant}: server up", highlight=False)
        for _ in range(options.rounds):
            turn: Rounds = {}
            for variant in order.sample(list(servers), len(servers)):
                servers[variant].resume()
                for streams in options.streams:
                    answer = servers[variant].round(streams, options.tokens)
                    if answer["other cores"] > QUIET_CORES:  # once more, whatever the others do then
                        answer = servers[variant].round(streams, options.tokens)
                    turn[streams, variant] = [answer]
                servers[variant].pause()
            for key, answers in turn.items():
                rounds.setdefault(key, []).extend(answers)
    if not rounds:
        raise SystemExit("interrupted before the first round had ended: nothing was written")
    records = records_of(rounds, options.variants)
    for streams in options.streams:
        console.print(table(records, streams))
    workload = {
        "streams": options.streams,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "LLM layers": None if options.model else options.layers,
        "largest share of other processes, in cores": max(one["other cores"] for own in rounds.values() for one in own),
    }
    path = options.out / f"streaming-{version}{options.name}.json"
    written = write_result(path, "streaming", records, seed=options.seed, python=options.python, workload=workload)
    console.print(str(written))
    if picture := draw(path.with_suffix(".png"), records):
        console.print(str(picture))


def records_of(rounds: Rounds, variants: Sequence[str]) -> list[dict[str, Any]]:
    """Return a record by number of streams, variant and measure; ratios are those of rounds.

    Those of `DRAWN` have the arrivals of the round in the middle by this measure.
    """
    found = []
    for streams in dict.fromkeys(streams for streams, _ in rounds):
        of_variant = {variant: rounds[streams, variant] for variant in variants}
        for one in record(of_variant, MEASURES):
            entry = {"streams": streams, **one}
            if one["measure"] == DRAWN:
                by_value = sorted(of_variant[one["variant"]], key=lambda answer: float(answer[DRAWN]))
                entry["arrivals"] = by_value[(len(by_value) - 1) // 2]["arrivals"]
            found.append(entry)
    return found


def table(records: Sequence[dict[str, Any]], streams: int) -> Table:
    """Show medians over the rounds, their spread, and the median ratio to stock in a round."""
    shown = Table(title=f"{streams} streams", title_justify="left", title_style="bold")
    own = [one for one in records if one["streams"] == streams]
    variants = list(dict.fromkeys(one["variant"] for one in own))
    shown.add_column("")
    for variant in variants:
        shown.add_column(variant, justify="right")
    for measure in dict.fromkeys(one["measure"] for one in own):
        shown.add_row(measure, *(cell(one) for one in own if one["measure"] == measure))
    same = {one["variant"]: one["same_answers"] for one in own}
    shown.add_row("same tokens", *("yes" if same[variant] else "NO" for variant in variants))
    return shown


def cell(one: dict[str, Any]) -> str:
    said = f"{one['median']:.4g} ({one['least']:.3g}-{one['most']:.3g})"
    if one["variant"] == STOCK or one["of_stock"] is None:
        return said
    return f"{said} {one['of_stock']:.2f}x"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    parser.add_argument(
        "--streams", type=lambda text: [at_least_one(word) for word in text.split(",")], default=[1, 4, 8]
    )
    parser.add_argument("--tokens", type=at_least_two, default=256, help="of each stream; 2 or more")
    parser.add_argument("--variants", type=some_of(VARIANTS, "variant", ";"), default=list(DEFAULT), help="between ;")
    parser.add_argument(
        "--layers", type=at_least_one, default=MODEL["llm_layers"], help="of the LLM: a step takes longer with more"
    )
    parser.add_argument("--draw", type=Path, metavar="RESULT", help="only draw the picture of a result file again")
    parser.add_argument("--model", help="default: a tiny LLaVA with so many layers")
    add_common(parser, rounds=5, python=True, name=True)
    options = parser.parse_args(arguments)
    if STOCK not in options.variants:
        parser.error(f"--variants needs {STOCK!r}: ratios are to it")
    return options


if __name__ == "__main__":
    main()
