"""`python -m benchmarks.gpu.ipc`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import random
import secrets
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.device import name_of_gpu, write_gpu_result
from benchmarks.gpu.ipc import FEWER, MESSAGES, SIZES, THEIRS, VARIANTS
from benchmarks.gpu.ipc.report import Found, a_round, complaints, record, table
from benchmarks.harness.arguments import add_common, some_of
from benchmarks.harness.child import Child, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.screen import console

ORDER_BYTES, ORDER_MESSAGES = 16 << 20, 10


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    gpu = name_of_gpu("gpu.ipc")
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    rows = record(measure(options, "cuda:0"), SIZES)
    console.print(table(rows, gpu))
    path = write_gpu_result(
        options.out,
        "gpu.ipc",
        gpu,
        rows,
        seed=options.seed,
        workload={"messages": MESSAGES, "rounds": options.rounds, "order": ORDER_MESSAGES},
    )
    console.print(str(path))
    if found := complaints(rows):
        raise SystemExit("; ".join(found))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ipc", description=__doc__)
    sizes, variants = some_of(SIZES, "size"), some_of(VARIANTS, "variant", ";")
    parser.add_argument("--sizes", type=sizes, default=list(SIZES), help='of a tensor: "64 KB,1 MB"; default: all')
    parser.add_argument("--variants", type=variants, default=list(VARIANTS), help="separated by ';'; default: all")
    parser.add_argument("--directory", default="/dev/shm", help="of the arena; a large tensor needs room in it")
    add_common(parser, rounds=3, seed_help="of the order in a round")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, device: str) -> Found:
    """Measure every variant in every round, in random order; drop one that this machine cannot run."""
    order, found, run = random.Random(options.seed), Found(), secrets.token_hex(4)
    with tempfile.NamedTemporaryFile(prefix="taken-", dir="/dev/shm") as taken:
        taken.truncate(8)
        common = [taken.name, device, options.directory, f"bench-{run}"]
        with (
            Child("benchmarks.gpu.ipc.peer", ["sender", *common]) as sender,
            Child("benchmarks.gpu.ipc.peer", ["receiver", *common]) as receiver,
        ):
            sender.next_event()
            receiver.next_event()
            talk = Talk(sender, receiver)
            for turn in range(options.rounds):
                for size in options.sizes:
                    for variant in order.sample(options.variants, len(options.variants)):
                        if (size, variant) not in found.refused:
                            one(talk, found, size, variant, turn)
                console.print(f"round {turn + 1} of {options.rounds}", highlight=False)
            for variant in options.variants:
                in_order(talk, found, variant)
    return found


class Talk:
    """Conversation with sender and receiver, which number messages alike."""

    def __init__(self, sender: Child, receiver: Child) -> None:
        self._sender, self._receiver, self._count = sender, receiver, 0

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ask both sides and return both answers; the receiver first, so that the sender finds it."""
        start, self._count = self._count, self._count + 10_000
        whole = {**request, "start": start}
        assert self._receiver.process.stdin is not None
        self._receiver.process.stdin.write(json.dumps(whole) + "\n")
        self._receiver.process.stdin.flush()
        return self._sender.ask(**whole), self._receiver.next_event()


def one(talk: Talk, found: Found, size: str, variant: str, turn: int) -> None:
    messages = max(3, MESSAGES[size] // FEWER) if variant == THEIRS else MESSAGES[size]
    request = {"variant": variant, "task": "time", "nbytes": SIZES[size], "messages": messages}
    sent, got = talk.ask({**request, "label": f"{SIZES[size]}-{turn}"})
    if failed := sent.get("failed") or got.get("failed"):
        found.refused[size, variant] = failed
    else:
        found.rounds.setdefault((size, variant), []).append(a_round(sent, got))


def in_order(talk: Talk, found: Found, variant: str) -> None:
    request = {"variant": variant, "task": "order", "nbytes": ORDER_BYTES, "messages": ORDER_MESSAGES}
    sent, got = talk.ask({**request, "label": "order"})
    if failed := sent.get("failed") or got.get("failed"):
        found.refused["order", variant] = failed
    else:
        found.order[variant] = {"messages": ORDER_MESSAGES, "early": sent["early"], "wrong": got["wrong"]}


if __name__ == "__main__":
    main()
