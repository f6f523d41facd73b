"""`python -m benchmarks.planning`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.planning import BAR_SECONDS
from benchmarks.planning.trace import RATE, write
from vllm_omni_sched.sim.costs.hardware import LINKS
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.plan.compare import find_plans
from vllm_omni_sched.sim.plan.findings import limit
from vllm_omni_sched.sim.plan.load import Load
from vllm_omni_sched.sim.plan.search import Planner
from vllm_omni_sched.sim.plan.systems import PRICES, Choices, command, known_devices, offer
from vllm_omni_sched.sim.scenario.scenario import Slo
from vllm_omni_sched.sim.workloads.importers import TraceFormat, import_trace
from vllm_omni_sched.sim.workloads.replay import TraceOptions


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = options.trace
        if file is None:
            file = Path(folder) / "synthetic.jsonl"
            write(file, options.seconds, options.rate, options.seed)
        record = measure(file, options)
    name = "planning.json" if options.trace is not None else "planning-synthetic.json"
    note = "one thread, without compiled modules"
    path = write_result(options.out / name, "planning", [record], seed=options.seed, note=note)
    console.print(table(record))
    console.print(str(path))


def measure(file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plan for the trace, and count: CPU seconds of this process, trials, and the requests simulated in them."""
    slo = Slo(ttft_seconds=options.ttft, itl_seconds=options.tpot, attainment=options.attainment, itl_of="mean")
    began = time.process_time()
    trace = import_trace(file, TraceFormat.MOONCAKE).trace
    load = Load(trace, TraceOptions(file=file.name))
    shape = model(options.model)
    offered = offer(shape, known_devices(), PRICES, shape.precision, options.max_gpus, load.longest)
    choices = Choices(
        shape, shape.hub, offered.layouts, options.max_gpus, load.items, shape.precision,
        link=LINKS["ethernet-400g"], longest=load.longest,
    )  # fmt: skip
    planner = Planner(choices, load, slo)
    found = find_plans(planner, choices, load, slo)
    limited = limit(choices, load, slo, found.best.plan)
    seconds = time.process_time() - began
    plan = found.best.plan
    asked = [block for one in trace.requests for block in one.blocks]
    return {
        "trace": "Mooncake's, as it is published" if options.trace is not None else "made up, see trace.py",
        "file": file.name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "requests": len(trace.requests),
        "seconds": trace.seconds,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "blocks_seen_before": 1 - len(set(asked)) / max(len(asked), 1),
        "model": shape.name,
        "slo": slo.model_dump(mode="json"),
        "layouts": len(choices.layouts),
        "trials": found.trials._asdict(),
        "simulated_requests": planner.tally.requests,
        "cpu_seconds": seconds,
        "bar_seconds": BAR_SECONDS,
        "plan": {
            "best": "ours" if found.ours is not None else "stock",
            "device": plan.system.layout.device,
            "devices": plan.devices,
            "dollars_per_hour": plan.price,
            "attainment": found.best.attainment,
            "limit": limited.resource,
            "command": command(choices, plan.system),
        },
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation_trace.jsonl; default: a made-up hour")
    parser.add_argument("--model", default="qwen2.5-vl-7b")
    parser.add_argument("--max-gpus", type=int, default=64)
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--tpot", type=float, default=0.05)
    parser.add_argument("--attainment", type=float, default=0.9)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the made-up trace")
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second of the made-up trace")
    add_common(parser)
    return parser.parse_args(arguments)


def table(record: dict[str, Any]) -> Table:
    shown = Table(title=f"{record['file']}: {record['requests']:,} requests", title_justify="left", title_style="bold")
    for column in ("trials", "requests simulated", "CPU s", "within the bar", "cheapest plan"):
        shown.add_column(column, justify="left" if column == "cheapest plan" else "right")
    plan = record["plan"]
    shown.add_row(
        f"{sum(record['trials'].values()):,}",
        f"{record['simulated_requests']:,}",
        f"{record['cpu_seconds']:,.0f}",
        "yes" if record["cpu_seconds"] <= record["bar_seconds"] else "NO",
        f"{plan['devices']} x {plan['device']}, ${plan['dollars_per_hour']:,.2f} per hour, {plan['best']}",
    )
    return shown


if __name__ == "__main__":
    main()
