"""`python -m benchmarks.serve`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.harness.arguments import add_common, some_of
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.server import Server
from benchmarks.mixed.__main__ import slow_model
from benchmarks.mixed.report import Answers, record, table
from benchmarks.serve import VARIANTS
from benchmarks.serve.aiperf import AiperfClient, program
from benchmarks.serve.client import BenchClients, RoundFailed
from benchmarks.serve.plot import draw
from benchmarks.serve.workloads import RANDOM_MM, WORKLOADS

VLLM_CLIENT, AIPERF = "vllm", "aiperf"
SERVER = [
    *("--max-model-len", "20480", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"),
    *("--limit-mm-per-prompt", '{"image": 9}', "--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"),
    *("--gpu-memory-utilization", "0.4"),
]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    if options.client == AIPERF:
        program()  # before any server is started
    model = Path(options.model) if options.model else slow_model()
    order = random.Random(options.seed)
    answers: Answers = {}
    version = "?"
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        servers = {}
        for variant in options.variants:
            servers[variant] = Server(
                stack,
                options.python,
                model,
                [*SERVER, *VARIANTS[variant]],
                log=f"serve-{variant}",
                stock=variant.startswith("stock"),
                polling=options.polling,
                environment={"VLLM_CPU_KVCACHE_SPACE": "2"},
            )
        for variant, server in servers.items():
            server.wait()
            console.print(f"{variant}: server up", highlight=False)
        version = next(iter(servers.values())).version()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = make_clients(stack, options, model, folder)
        for server in servers.values():  # warm up
            clients.send(server, [RANDOM_MM], load=1.0, seconds=8.0, seed=options.seed + 1_000)
        for workload in options.workloads:
            for turn in range(options.rounds):
                drawn = order.sample(list(servers), len(servers))
                chosen = {"load": options.load, "seconds": options.seconds, "seed": options.seed + turn}
                try:
                    of_turn = {name: clients.send(servers[name], WORKLOADS[workload], **chosen) for name in drawn}
                except RoundFailed as failure:
                    console.print(f"{workload}, round {turn + 1}: left out, {failure}", highlight=False)
                    continue
                for variant, answer in of_turn.items():
                    answers.setdefault((variant, workload), []).append(answer)
            if (options.variants[0], workload) in answers:
                console.print(table(answers, workload, options.variants, workload))
    if not answers:
        raise SystemExit("no round has ended: nothing was written")
    records = [
        {"workload": entry.pop("load"), **entry}
        for entry in record(dict(sorted(answers.items(), key=lambda item: options.variants.index(item[0][0]))))
    ]
    name = "" if options.client == VLLM_CLIENT else f"-{options.client}"
    path = options.out / f"serve-{version}{name}{options.name}.json"
    asked = {
        "client": clients.title,
        "worker polls": options.polling,
        "load": options.load,
        "seconds": options.seconds,
        "rounds": options.rounds,
    }
    console.print(str(write_result(path, "serve", records, seed=options.seed, python=options.python, workload=asked)))
    if picture := draw(path.with_suffix(".png"), records, clients.title):
        console.print(str(picture))


def make_clients(
    stack: ExitStack, options: argparse.Namespace, model: Path, folder: Path
) -> BenchClients | AiperfClient:
    """Return what sends the requests of a round."""
    if options.client == AIPERF:
        return AiperfClient(model, folder)
    number = max(len(WORKLOADS[workload]) for workload in options.workloads)
    return BenchClients(stack, options.python, model, folder, number)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument(
        "--client", choices=[VLLM_CLIENT, AIPERF], default=VLLM_CLIENT, help="aiperf: in an environment of its own"
    )
    parser.add_argument("--workloads", type=some_of(WORKLOADS, "workload"), default=list(WORKLOADS))
    parser.add_argument(
        "--variants",
        type=some_of(VARIANTS, "variant"),
        default=["stock", "stock one picture a step", "ours"],
    )
    parser.add_argument("--load", type=float, default=1.0, help="multiplies the rates of the workloads")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in a round")
    parser.add_argument("--polling", action="store_true", help="let vLLM's worker poll, as it does by default")
    parser.add_argument("--model", help="default: the tiny LLaVA with a slow tower")
    parser.add_argument("--python", default=sys.executable, help="interpreter whose vLLM is measured, as its client")
    add_common(parser, rounds=4, name=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
