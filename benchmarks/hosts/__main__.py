"""`python -m benchmarks.hosts`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, quantile
from benchmarks.hosts import ENGINE, HIDDEN, KINDS, LINKS, PACKED, RAW, SIDES, SIZES, STORE
from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.mooncake import why_not

MESSAGES = {"64 KB": 8, "1 MB": 4, "16 MB": 1}  # of a round
WARM_UP = 1
LEARNS = 5  # messages after which the connector of this package knows the speed of a link
PORT = 50051
Sides = dict[str, tuple[Child, Child]]
What = tuple[str, str, str]
"""Link, kind and size of a message."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if reason := hosts.why_not() or why_not():
        raise SystemExit(f"cannot measure here: {reason}")
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    order = random.Random(options.seed)
    samples: dict[tuple[What, str], list[float]] = {}
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        one, other = network.host(), network.host()
        sides: Sides = {side: open_side(stack, side, one, other, number) for number, side in enumerate(SIDES)}
        (version,) = {child.next_event()["vllm_omni"] for pair in sides.values() for child in pair}
        for link in options.links:
            for host in (one, other):
                host.limit(LINKS[link])
            for number in range(LEARNS):
                for side in (RAW, PACKED):
                    one_message(sides, side, (link, HIDDEN, "1 MB"), f"learns-{number}")
            for turn in range(options.rounds):
                for kind in KINDS:
                    for size in options.sizes:
                        try:
                            found = one_round(sides, (link, kind, size), turn, order)
                        except ChildFailed as failure:
                            raise SystemExit(f"{link}, {kind}, {size}: {failure}") from None
                        for side, seconds in found.items():
                            samples.setdefault(((link, kind, size), side), []).append(seconds)
            console.print(f"{link} is done")
    records = record(samples)
    console.print(table(records))
    workload = {
        "messages of a round": MESSAGES,
        "link": "tc tbf at both ends of the links of two network namespaces on a bridge",
        "vllm_omni": version.split("+")[0],
        STORE: "its calls, since it cannot start with this release of Mooncake",
    }
    path = options.out / "hosts.json"
    console.print(str(write_result(path, "hosts", records, seed=options.seed, workload=workload)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS), metavar="LINK")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), metavar="SIZE")
    add_common(parser, rounds=3)
    return parser.parse_args(arguments)


def open_side(stack: ExitStack, side: str, one: Host, other: Host, number: int) -> tuple[Child, Child]:
    """Start sender and receiver, with a Mooncake master of their own: else they would use the segments of others."""
    master = f"{one.address}:{PORT + number}"
    if side != ENGINE:
        one.start(hosts.mooncake_master(one, PORT + number))
    pair = []
    for role, host in (("sender", one), ("receiver", other)):
        with host.inside():
            child = Child("benchmarks.hosts.peer", [side, role, host.address, master])
        pair.append(stack.enter_context(child))
    return pair[0], pair[1]


def one_round(sides: Sides, what: What, turn: int, order: random.Random) -> dict[str, float]:
    """Messages of one size, one after the other, the sides in turns; the median seconds of put and get together."""
    took: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(WARM_UP + MESSAGES[what[2]]):
        for side in order.sample(list(sides), len(sides)):
            took[side].append(one_message(sides, side, what, f"{turn}-{number}"))
    return {side: quantile(seconds[WARM_UP:], 0.5) for side, seconds in took.items()}


def one_message(sides: Sides, side: str, what: What, name: str) -> float:
    """Put a message and get it; return the seconds that both took. Each link has an edge of its own."""
    link, kind, size = what
    request = {"key": "-".join((*what, name)), "kind_of": kind, "nbytes": SIZES[size]}
    request["stage"] = str(1 + list(LINKS).index(link))
    sender, receiver = sides[side]
    put = sender.ask(do="put", **request)
    got = receiver.ask(do="get", told=put["told"], **request)
    if put["checksum"] != got["checksum"]:
        raise SystemExit(f"{side}: what arrived is not what was sent ({link}, {kind}, {size})")
    return float(put["seconds"] + got["seconds"])


def record(samples: dict[tuple[What, str], list[float]]) -> list[dict[str, Any]]:
    """Return, per message and side, the rounds and the median ratios of vLLM-Omni's connectors to ours."""
    found = []
    for (what, side), rounds in samples.items():
        entry = {**dict(zip(("link", "kind_of", "size"), what, strict=True)), "variant": side}
        entry |= Summary.of(rounds).as_dict(9)
        if side in (RAW, PACKED):
            for name, theirs in (("store_over_it", STORE), ("engine_over_it", ENGINE)):
                ratios = [a / b for a, b in zip(samples[what, theirs], rounds, strict=True)]
                entry[name] = round(quantile(ratios, 0.5), 3)
        found.append(entry)
    return found


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="ms per message; × is what the store and the engine take", title_justify="left")
    for column in ("link", "", "", *SIDES):
        shown.add_column(column, justify="right")
    for what in dict.fromkeys((one["link"], one["kind_of"], one["size"]) for one in records):
        line = {one["variant"]: one for one in records if (one["link"], one["kind_of"], one["size"]) == what}
        shown.add_row(*what, *(_cell(line[side]) for side in SIDES))
    return shown


def _cell(one: dict[str, Any]) -> str:
    ratios = [f"×{one[name]:.2f}" for name in ("store_over_it", "engine_over_it") if name in one]
    return f"{one['median'] * 1e3:,.3g}" + (f" ({', '.join(ratios)})" if ratios else "")


if __name__ == "__main__":
    main(sys.argv[1:])
