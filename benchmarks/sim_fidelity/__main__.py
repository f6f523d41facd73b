"""`python -m benchmarks.sim_fidelity`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.arguments import add_common, some_of
from benchmarks.harness.child import Child, ChildFailed, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.mixed import VARIANTS
from benchmarks.mixed.__main__ import slow_model
from benchmarks.mixed.serve import ENGINE
from benchmarks.sim_fidelity import pipeline
from benchmarks.sim_fidelity.compare import Rounds, compare
from benchmarks.sim_fidelity.plot import draw
from vllm_omni_sched.sim.costs.measured import MeasuredCosts

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    for task in options.tasks:
        TASKS[task](options)


def engine(options: argparse.Namespace) -> None:
    """Measure and simulate the engine of `benchmarks.mixed`."""
    model = slow_model()
    with tempfile.TemporaryDirectory() as folder:
        calibration = options.calibration or calibrated(model, Path(folder) / "calibration.json", options.rounds)
        costs = MeasuredCosts.read(calibration)
        source = json.loads(calibration.read_text())
    if options.measured:
        rounds: Rounds = json.loads(options.measured.read_text())
    else:
        rounds = [one for variant in options.variants for one in measured(model, variant, options)]
    if options.keep:
        options.keep.write_text(json.dumps(rounds))
    records = compare(rounds, costs)
    console.print(table(records))
    workload = {
        "loads": sorted({one["load"] for one in rounds}),
        "seconds": options.seconds,
        "seeds": sorted({one["seed"] for one in rounds}),
    }
    path = options.out / "sim_fidelity.json"
    write_result(path, "sim_fidelity", records, seed=options.seed, workload=workload, calibration=source)
    console.print(str(path))
    console.print(str(draw(path.with_suffix(".png"), rounds, costs, records)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim_fidelity", description=__doc__)
    parser.add_argument("--tasks", type=some_of(TASKS, "task"), default=list(TASKS), help=f"of {','.join(TASKS)}")
    parser.add_argument(
        "--loads", type=lambda text: [float(word) for word in text.split(",")], default=[0.125, 0.25, 0.5]
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals in a round")
    parser.add_argument("--variants", type=some_of(VARIANTS, "variant"), default=["stock", "ours"])
    parser.add_argument("--calibration", type=Path, help="use this file, and measure none")
    parser.add_argument("--measured", type=Path, help="use these rounds, and measure none")
    parser.add_argument("--keep", type=Path, help="keep the measured rounds here, for --measured")
    parser.add_argument("--pipeline-measured", type=Path, help="use these waves of the pipeline, and measure none")
    parser.add_argument("--pipeline-keep", type=Path, help="keep the measured waves here, for --pipeline-measured")
    add_common(
        parser,
        rounds=6,
        rounds_help="of each load; and half as many of the calibration",
        seed=100,
        seed_help="of the first round; the calibration has other data",
    )
    return parser.parse_args(arguments)


TASKS = {"engine": engine, "pipeline": pipeline.run}


def calibrated(model: Path, out: Path, rounds: int) -> Path:
    words = ["calibrate", str(model), "--engine-args", json.dumps(ENGINE), "--rounds", str(max(rounds // 2, 1))]
    script = "import sys; from vllm_omni_sched.cli import app; app(sys.argv[1:])"

    subprocess.run(
        [sys.executable, "-c", script, *words, "--out", str(out)],
        check=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
    )
    return out


def measured(model: Path, variant: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all rounds of one variant, on an engine that has the machine to itself."""
    found = []
    environment = ENVIRONMENT | ({"VLLM_PLUGINS": ""} if variant == "stock" else {})
    words = ["--model", str(model), "--variant", variant]
    try:
        with Child("benchmarks.sim_fidelity.serve", words, environment=environment) as engine:
            engine.next_event()
            engine.ask(load=1.0, seconds=4.0, seed=options.seed - 1)  # warm up
            for turn in range(options.rounds):
                for load in options.loads:
                    asked = {"load": load, "seconds": options.seconds, "seed": options.seed + turn}
                    answer = engine.ask(**asked)
                    kept = {key: answer[key] for key in ("requests", "references")}
                    found.append({"variant": variant, **asked, **kept})
                    console.print(f"{variant}, load {load:g}, round {turn + 1}", highlight=False)
    except ChildFailed as failure:
        raise SystemExit(f"{variant}: {failure}") from None
    return found


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="measured and simulated, ms", title_justify="left", title_style="bold")
    for name in ("variant", "load", "figure", "measured", "simulated", "off", ""):
        shown.add_column(name, justify="left" if name in ("variant", "figure", "") else "right")
    for r in records:
        said = "" if r["within"] else "too far"
        numbers = (f"{r['measured_ms']:,.4g}", f"{r['simulated_ms']:,.4g}", f"{100 * r['off']:+.1f} %")
        load = "all" if r["load"] is None else f"{r['load']:g}"
        shown.add_row(r["variant"], load, r["measure"], *numbers, said)
    return shown


if __name__ == "__main__":
    main()
