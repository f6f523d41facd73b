"""`python -m benchmarks.handover`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.handover import THEIRS, VARIANTS
from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, quantile
from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.distribution import environment
from dev.omni_cpu.spec import MODES

PARTS = ("hand-over", "put", "turn", "get", "put to got", "floor")
MESSAGES = {"first": "first of a request", "later": "later ones"}
QUANTILES = {"P50": 0.5, "P99": 0.99}

Rounds = dict[str, list[dict[str, Any]]]  # by connector


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    records: list[dict[str, Any]] = []
    for mode in options.modes:
        try:
            rounds, version = run(mode, options)
        except ChildFailed as failure:
            raise SystemExit(f"{mode}: {failure}") from None
        records += record(mode, rounds) + answers(mode, rounds)
        console.print(table(mode, records))
    workload = {name: getattr(options, name) for name in ("requests", "rounds", "first_bytes", "later_bytes")}
    path = options.out / f"handover-omni-{version.split('+')[0]}.json"
    console.print(str(write_result(path, "handover", records, seed=options.seed, workload=workload)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handover", description=__doc__)
    parser.add_argument("--requests", type=int, default=64, help="in flight at once")
    parser.add_argument("--modes", type=lambda word: word.split(","), default=list(MODES))
    parser.add_argument("--first-bytes", type=int, default=1 << 20, help="of the first message of a request on an edge")
    parser.add_argument("--later-bytes", type=int, default=8 << 10, help="of each later one, in async-chunk mode")
    add_common(parser, rounds=7)
    return parser.parse_args(arguments)


def run(mode: str, options: argparse.Namespace) -> tuple[Rounds, str]:
    """Rounds of one pipeline, by connector, and the version of vLLM-Omni. Connectors take turns in random order."""
    from dev.tiny_models.llama import write_llama

    order, rounds = random.Random(options.seed), {name: [] for name in VARIANTS}
    folder = Path(tempfile.mkdtemp(prefix="handover-"))
    words = ["--model", str(write_llama(ROOT / ".models" / "llama")), "--folder", str(folder), "--mode", mode]
    for name in ("requests", "first_bytes", "later_bytes"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    plugins = environment(folder / "site", {"omni_handover": "benchmarks.handover.connector:register"})
    around = plugins | {"VLLM_OMNI_SCHED_ARENA": f"bench-{secrets.token_hex(4)}"}
    path = [Path(word) for word in around.pop("PYTHONPATH").split(":")]
    try:
        with Child("benchmarks.handover.serve", words, path=path, environment=around) as pipeline:
            version = pipeline.next_event()["vllm_omni"]
            for turn in range(-1, options.rounds):  # the first one warms up
                for name in order.sample(list(VARIANTS), len(VARIANTS)):
                    found = pipeline.ask(variant=name, turn=turn + 1)
                    if turn >= 0:
                        rounds[name].append(found)
                console.print(f"{mode}: round {turn + 1} of {options.rounds}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rounds, version


def answers(mode: str, rounds: Rounds) -> list[dict[str, Any]]:
    """Count the answers that are not those of the first round of theirs.

    Few may differ over any connector: who is in a batch with whom depends on time, and sums of floats on that.

    Raises:
        SystemExit: more than one in a hundred do.
    """
    expected, found = rounds[THEIRS][0]["answers"], []
    for name, own in rounds.items():
        others = sum(one["answers"][request] != answer for one in own for request, answer in expected.items())
        found.append({"mode": mode, "variant": name, "answers": len(own) * len(expected), "that_differ": others})
        console.print(f"{mode}, {name}: {others} of {len(own) * len(expected)} answers differ from the first round's")
        if others * 100 > len(own) * len(expected):
            difference = next(filter(None, (first_difference(expected, one["answers"]) for one in own)))
            raise SystemExit(f"{others} answers over {name} are different, the first: {difference}")
    return found


def record(mode: str, rounds: Rounds) -> list[dict[str, Any]]:
    """Return, per connector, messages, part and quantile, the rounds and the median ratio of vLLM-Omni's to it."""
    found = []
    for messages in MESSAGES:
        for part in PARTS:
            for label, q in QUANTILES.items():
                values = {name: [of(one, messages, part, q) for one in own] for name, own in rounds.items()}
                for name, own in values.items():
                    if None in own:
                        continue
                    entry = {"mode": mode, "variant": name, "messages": messages, "part": part, "quantile": label}
                    entry |= Summary.of(own).as_dict(9)
                    if name != THEIRS and part != "floor" and all(own):
                        ratios = [a / b for a, b in zip(values[THEIRS], own, strict=True)]
                        entry["theirs_over_it"] = round(quantile(ratios, 0.5), 3)
                    found.append(entry)
    return found


def of(one: dict[str, Any], messages: str, part: str, q: float) -> float | None:
    """Return one quantile of one round, in seconds; None where there were no such messages."""
    which = [message for message in one["messages"] if message["first"] is (messages == "first")]
    took = [message[part] for message in which if message[part] is not None]
    return quantile(took, q) if took else None


def table(mode: str, records: list[dict[str, Any]]) -> Table:
    title = f"{mode}: milliseconds; × is how many times theirs takes"
    shown = Table(title=title, title_justify="left")
    for column in ("messages", "", "", *VARIANTS):
        shown.add_column(column, justify="right")
    for messages, meaning in MESSAGES.items():
        for part in PARTS:
            for label in QUANTILES:
                where = (mode, messages, part, label)
                line = {
                    e["variant"]: e
                    for e in records
                    if tuple(map(e.get, ("mode", "messages", "part", "quantile"))) == where
                }
                if line:
                    shown.add_row(meaning, part, label, *(cell(line[name]) for name in VARIANTS))
    return shown


def cell(entry: dict[str, Any]) -> str:
    ratio = f" (×{entry['theirs_over_it']:.1f})" if "theirs_over_it" in entry else ""
    return f"{entry['median'] * 1e3:,.4g}{ratio}"


if __name__ == "__main__":
    main(sys.argv[1:])
