"""`python -m benchmarks.backtest`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.backtest import ENGINE, ENVIRONMENT, MODEL, VARIANTS
from benchmarks.backtest.compare import compare
from benchmarks.backtest.plot import draw
from benchmarks.backtest.predict import predict, seal, write_scenario
from benchmarks.backtest.replay import replay
from benchmarks.backtest.traces import TRACES, Planned, plan, write
from benchmarks.harness.arguments import some_of
from benchmarks.harness.child import interrupt_on_terminate
from benchmarks.harness.processes import OtherProcesses
from benchmarks.harness.provenance import ROOT, write_result
from benchmarks.harness.screen import console
from benchmarks.harness.server import Server
from vllm_omni_sched.engine.calibration.served import words_of

Measured = dict[tuple[str, str], list[list[dict[str, Any]]]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    model = write_model()
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        calibration = options.calibration or calibrated(model, folder / "calibration.json", options.rounds)
        planned = plans(model, options, folder)
        predictions = predicted(options, folder, calibration)
        file = folder / "predictions.json"
        sealed = seal(file, predictions, calibration=json.loads(calibration.read_text()))
        console.print(f"predictions written, sha256 {sealed}", highlight=False)
        if options.predict_only:
            return
        measured, facts = measure(model, planned, options, folder)
    records = compare(predictions, measured)
    console.print(table(records))
    path = options.out / f"backtest{options.name}.json"
    about = {
        "predictions_sha256": sealed,
        "predicted_at": json.loads(file.read_text())["date"] if file.exists() else "",
        **facts,
        "workload": {"seconds": options.seconds, "repetitions": options.repetitions},
        "calibration": json.loads(calibration.read_text()),
    }
    console.print(str(write_result(path, "backtest", records, seed=options.seed, python=options.python, **about)))
    console.print(str(draw(path.with_suffix(".png"), records)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backtest", description=__doc__)
    parser.add_argument("--traces", type=some_of(TRACES, "trace"), default=list(TRACES))
    parser.add_argument("--variants", type=some_of(VARIANTS, "variant"), default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=24.0, help="of arrivals in a trace, behind the warm-up")
    parser.add_argument("--repetitions", type=int, default=2, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="of the calibration")
    parser.add_argument("--calibration", type=Path, help="use this file, and measure none")
    parser.add_argument("--predict-only", action="store_true", help="write predictions (with --keep), measure nothing")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep calibration, traces, predictions and times")
    parser.add_argument("--python", default=sys.executable, help="interpreter whose vLLM is measured")
    parser.add_argument("--name", default="", help="ends the name of the result file")
    parser.add_argument("--seed", type=int, default=0, help="of the traces; the calibration has other data")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(arguments)


def write_model() -> Path:
    from dev.tiny_models import write_llava

    return write_llava(ROOT / ".models" / "llava-backtest", **MODEL)


def calibrated(model: Path, out: Path, rounds: int) -> Path:
    """Calibrate the engine as a user does, with the loads of the product."""
    words = [
        "calibrate",
        str(model),
        "--engine-args",
        json.dumps(ENGINE),
        "--rounds",
        str(rounds),
        "--longest",
        "2048",
        "--server",
    ]
    script = "import sys; from vllm_omni_sched.cli import app; app(sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", script, *words, "--out", str(out)],
        check=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
    )
    return out


def plans(model: Path, options: argparse.Namespace, folder: Path) -> dict[str, list[Planned]]:
    """Draw the traces and write them for the simulator."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found = {}
    for name in options.traces:
        found[name] = plan(name, options.seconds, options.seed, tokenizer)
        write(folder / f"{name}.jsonl", name, found[name], options.seed)
    return found


def predicted(options: argparse.Namespace, folder: Path, calibration: Path) -> list[dict[str, Any]]:
    return [
        {
            "trace": name,
            "variant": variant,
            "figures": predict(write_scenario(folder, name, variant, options.seconds, calibration)),
        }
        for name in options.traces
        for variant in options.variants
    ]


def measure(
    model: Path, planned: dict[str, list[Planned]], options: argparse.Namespace, folder: Path
) -> tuple[Measured, dict[str, Any]]:
    """Replay each trace on a server of each variant, one after the other; return the times, and facts for the result.

    All servers are up, but only one has requests: an idle one sleeps.
    """
    found: Measured = {}
    busy: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = {
            variant: Server(
                stack,
                options.python,
                model,
                [*words_of({key: value for key, value in ENGINE.items() if key not in PASSED}), *VARIANTS[variant]],
                log=f"backtest-{variant}",
                stock=variant == "stock",
                environment=ENVIRONMENT,
            )
            for variant in options.variants
        }
        for server in servers.values():
            server.wait()
        version = next(iter(servers.values())).version()
        for repetition in range(options.repetitions):
            for name, requests in planned.items():
                for variant, server in servers.items():
                    watch = OtherProcesses()
                    answers = replay(server.url, requests, options.seed)
                    others = watch.share()
                    found.setdefault((name, variant), []).append(answers)
                    busy.append({"trace": name, "variant": variant, "cores": round(others, 3)})
                    console.print(
                        f"{name}, {variant}, repetition {repetition + 1}: other processes had {others:.2f} cores",
                        highlight=False,
                    )
    kept = [{"trace": name, "variant": variant, "rounds": rounds} for (name, variant), rounds in found.items()]
    (folder / "measured.json").write_text(json.dumps(kept))
    return found, {"vllm": version, "other_processes": busy}


PASSED = ("dtype", "enforce_eager", "worker_extension_cls")
"""Arguments that `Server` passes by itself."""


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table(title="predicted and measured; times in ms", title_justify="left", title_style="bold")
    for name in ("trace", "variant", "figure", "measured", "predicted", "off", "spread", ""):
        shown.add_column(name, justify="left" if name in ("trace", "variant", "figure", "") else "right")
    for r in records:
        scale = 1.0 if r["figure"] in ("tokens / s", "within SLO") else 1e3
        said = {True: "", False: "missed", None: ""}[r["within"]]
        said += " (within the spread)" if said and r["explained"] else ""
        numbers = (f"{scale * r['measured']:,.4g}", f"{scale * r['predicted']:,.4g}")
        shown.add_row(r["trace"], r["variant"], r["figure"], *numbers, f"{r['off']:+.1%}", f"{r['spread']:.1%}", said)
    return shown


if __name__ == "__main__":
    main()
