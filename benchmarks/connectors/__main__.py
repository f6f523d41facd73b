"""`python -m benchmarks.connectors`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.connectors import SIZES, THEIRS, VARIANTS
from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, quantile

MESSAGES = {"1 KB": 400, "64 KB": 400, "1 MB": 200, "16 MB": 40, "256 MB": 8}
MEASURES = ("end to end", "P99", "put", "get", "memory held per byte")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    order = random.Random(options.seed)
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.NamedTemporaryFile(prefix="taken-", dir="/dev/shm") as taken:
        taken.truncate(8)
        environment = {"VLLM_OMNI_SCHED_ARENA": f"bench-{secrets.token_hex(4)}"}
        with (
            Child("benchmarks.connectors.peer", ["sender", taken.name], environment=environment) as sender,
            Child("benchmarks.connectors.peer", ["receiver", taken.name], environment=environment) as receiver,
        ):
            version = sender.next_event()["vllm_omni"]
            receiver.next_event()
            for turn in range(options.rounds):
                for size in options.sizes:
                    for variant in order.sample(list(VARIANTS), len(VARIANTS)):
                        try:
                            found = one_round(sender, receiver, variant, size, SIZES[size], turn)
                        except ChildFailed as failure:
                            raise SystemExit(f"{variant}, {size}: {failure}") from None
                        samples.setdefault((size, variant), []).append(found)
                console.print(f"round {turn + 1} of {options.rounds}")
    records = record(samples)
    console.print(table(records))
    path = options.out / f"connectors-omni-{version.split('+')[0]}.json"
    console.print(str(write_result(path, "connectors", records, seed=options.seed, workload={"messages": MESSAGES})))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.connectors", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), metavar="SIZE")
    add_common(parser, rounds=5)
    return parser.parse_args(arguments)


def one_round(sender: Child, receiver: Child, variant: str, size: str, nbytes: int, turn: int) -> dict[str, float]:
    """Send messages of one size over one connector, one by one; return seconds, P50 unless named P99."""
    request = {
        "variant": variant,
        "nbytes": nbytes,
        "messages": MESSAGES[size],
        "label": f"{size[:-3]}-{size[-2:]}-{turn}",
    }
    tell(receiver, request)
    sent = sender.ask(**request)
    got = receiver.next_event()
    took = [end - begin for begin, end in zip(sent["begun"], got["got"], strict=True)]
    held = sender.ask(**request | {"do": "holder", "messages": 4, "label": f"held-{request['label']}"})
    return {
        "end to end": quantile(took, 0.5),
        "P99": quantile(took, 0.99),
        "put": quantile([end - begin for begin, end in zip(sent["begun"], sent["ended"], strict=True)], 0.5),
        "get": quantile(got["took"], 0.5),
        "memcpy": sent["memcpy"],
        "memory held per byte": held["held_per_byte"],
    }


def tell(child: Child, request: dict[str, Any]) -> None:
    assert child.process.stdin is not None
    child.process.stdin.write(json.dumps(request) + "\n")
    child.process.stdin.flush()


def record(samples: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return, per size, connector and measure, the rounds and the median ratio of vLLM-Omni's connector to it."""
    found = []
    for (size, variant), rounds in samples.items():
        for measure in rounds[0]:
            own = [one[measure] for one in rounds]
            entry = {"size": size, "variant": variant, "measure": measure, **Summary.of(own).as_dict(9)}
            if variant != THEIRS and measure != "memcpy":
                theirs = [one[measure] for one in samples[size, THEIRS]]
                entry["theirs_over_it"] = round(quantile([a / b for a, b in zip(theirs, own, strict=True)], 0.5), 3)
            found.append(entry)
    return found


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="one message, microseconds at P50; × is how many times theirs takes", title_justify="left")
    variants = list(dict.fromkeys(entry["variant"] for entry in records))
    for column in ("", "", *variants):
        shown.add_column(column, justify="right")
    for size in dict.fromkeys(entry["size"] for entry in records):
        for measure in (*MEASURES, "memcpy"):
            line = {e["variant"]: e for e in records if (e["size"], e["measure"]) == (size, measure)}
            cells = [cell(line[variant], measure) for variant in variants]
            shown.add_row(size if measure == MEASURES[0] else "", measure, *cells)
    return shown


def cell(entry: dict[str, Any], measure: str) -> str:
    value = entry["median"] if measure == "memory held per byte" else entry["median"] * 1e6
    ratio = f" (×{entry['theirs_over_it']:.1f})" if "theirs_over_it" in entry else ""
    return f"{value:,.4g}{ratio}"


if __name__ == "__main__":
    main(sys.argv[1:])
